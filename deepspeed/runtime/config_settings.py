"""The top level of the DeepSpeed JSON as one frozen model, in groups."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from deepspeed.runtime.config_base import (
    Count,
    OptionalDtype,
    PositiveCount,
    PositiveNumber,
    Section,
    expected,
)
from deepspeed.runtime.config_sections import (
    ActivationCheckpointingConfig,
    AioConfig,
    BF16Config,
    CheckpointConfig,
    CometConfig,
    DataTypesConfig,
    FP16Config,
    OptimizerConfig,
    SchedulerConfig,
    TensorBoardConfig,
    TimersConfig,
    WandbConfig,
)
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def _steps_per_print(value: Any) -> Any:
    if isinstance(value, (bool, str)) or (value is not None and not value >= 0):
        raise expected("a number >= 0", "Use 0, null or infinity to print nothing.")
    return value


def _clipping(value: Any) -> Any:
    if isinstance(value, (bool, str)) or value is None or not 0 <= value < float("inf"):
        raise expected(
            "a number >= 0", "Use 0.0 for no clipping, or leave the key out for the default of 1.0."
        )
    return value


def _log_level(value: Any) -> Any:
    if value is not None and str(value).lower() not in LOG_LEVELS:
        raise expected(f"one of {', '.join(LOG_LEVELS)}")
    return value


class BatchKeys(Section):
    """The batch triangle, complete, and what goes with it.

    train_batch_size: samples a step, over all ranks. train_micro_batch_size_per_gpu: samples a forward.
    gradient_accumulation_steps: forwards a step.
    dataloader_drop_last: the built-in loader leaves out a short last batch.
    managed_gradient_accumulation: the engine counts micro-batches itself; false: every step() steps.
    """

    train_batch_size: PositiveCount
    train_micro_batch_size_per_gpu: PositiveCount
    gradient_accumulation_steps: PositiveCount
    dataloader_drop_last: bool = False
    managed_gradient_accumulation: bool = True


class GradientKeys(Section):
    """What happens to gradients between backward and step.

    gradient_clipping: largest global 2-norm, 0 for no clipping; absent means 1.0, as in DeepSpeed 0.19.8.
    prescale_gradients, gradient_predivide_factor: where to divide by the number of ranks. Any value holds
    what it is for: the mean is taken so that no sum can overflow.
    communication_data_type: dtype on the wire; null for the gradients' own.
    gradient_allreduce_op: "sum" is refused.
    seq_parallel_communication_data_type and disable_allgather have no effect here.
    """

    gradient_clipping: Annotated[float, BeforeValidator(_clipping)] = 1.0
    prescale_gradients: bool = False
    gradient_predivide_factor: PositiveNumber = 1.0
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    communication_data_type: OptionalDtype = None
    seq_parallel_communication_data_type: OptionalDtype = None
    disable_allgather: bool = False


class TrainingKeys(Section):
    """Precision, optimizer, schedule and partitioning: one section each.

    zero_allow_untested_optimizer: a client's optimizer outside DeepSpeed's own list may be partitioned.
    zero_force_ds_cpu_optimizer: false lets a torch optimizer run on the offloaded shard.
    """

    fp16: FP16Config = FP16Config()
    bf16: BF16Config = BF16Config()
    data_types: DataTypesConfig = DataTypesConfig()
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    zero_optimization: DeepSpeedZeroConfig = DeepSpeedZeroConfig()
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: bool = True


class ReportKeys(Section):
    """What is printed, and when.

    steps_per_print: steps between progress lines; 0, null or infinity for none.
    wall_clock_breakdown: time of forward, backward and step. memory_breakdown: memory at each of them.
    dump_state: print the configuration. log_level: of DeepSpeed's logger.
    tensorboard, wandb, csv_monitor: where each step's learning rate and loss go. comet is refused when on.
    """

    steps_per_print: Annotated[float | int | None, BeforeValidator(_steps_per_print)] = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    log_level: Annotated[str | None, BeforeValidator(_log_level)] = None
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    csv_monitor: TensorBoardConfig = TensorBoardConfig()
    wandb: WandbConfig = WandbConfig()
    comet: CometConfig = CometConfig()
    timers: TimersConfig = TimersConfig()


class OtherKeys(Section):
    """Checkpoints, and what is accepted for the sake of configurations that carry it.

    disable_python_gc, vocabulary_size and aio have no effect. sequence_parallel_size above 1 and
    use_data_before_expert_parallelism are refused. data_parallel_size: must be the world size.
    """

    checkpoint: CheckpointConfig = CheckpointConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    aio: AioConfig = AioConfig()
    disable_python_gc: bool = False
    vocabulary_size: Count | None = None
    use_data_before_expert_parallelism: bool = False
    sequence_parallel_size: PositiveCount = 1
    data_parallel_size: PositiveCount | None = None


class Settings(BatchKeys, GradientKeys, TrainingKeys, ReportKeys, OtherKeys):
    """Every top-level key that this package knows; features that it refuses are in config_unsupported.py."""
