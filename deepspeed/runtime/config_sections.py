"""Models of the JSON's sections, except ``zero_optimization`` (deepspeed/runtime/zero/config.py)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field

from deepspeed.runtime.config_base import (
    Count,
    NonNegativeNumber,
    OptionalDtype,
    PositiveCount,
    Section,
    expected,
)


def _loss_scale(value: Any) -> Any:
    advice = "Use 0 for a dynamic loss scale, or a fixed positive number."
    if isinstance(value, (bool, str)) or value is None:
        raise expected("a number >= 0", advice)
    if not 0 <= float(value) < float("inf"):
        raise expected("a finite number >= 0", advice)
    return value


class FP16Config(Section):
    """``fp16``: half-precision weights with loss scaling.

    enabled, auto_cast: cast the weights, and the inputs of forward too.
    loss_scale: 0 for dynamic, else fixed.
    initial_scale_power: a dynamic scale starts at 2 to this power.
    loss_scale_window: clean steps before it doubles.
    hysteresis, consecutive_hysteresis: overflows until it halves, and whether a clean step refills them.
    min_loss_scale: floor of a dynamic scale.
    fp16_master_weights_and_grads: refused when on.
    """

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: Annotated[float, BeforeValidator(_loss_scale)] = 0.0
    initial_scale_power: Annotated[int, Field(ge=0, le=127)] = 16
    loss_scale_window: PositiveCount = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: NonNegativeNumber = 1.0
    fp16_master_weights_and_grads: bool = False

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the overflows (``loss_scale`` 0)."""
        return self.loss_scale == 0

    @property
    def initial_loss_scale(self) -> float:
        """Loss scale of the first step."""
        return 2.0**self.initial_scale_power if self.dynamic_loss_scale else self.loss_scale


class BF16Config(Section):
    """``bf16``, also written ``bfloat16``: bfloat16 weights, no loss scaling.

    check_grad_overflow: find non-finite gradients and skip the step; on by default.
    immediate_grad_update: accepted; gradients reach the accumulator as they are reduced in any case.
    bf16_master_weights_and_grads: gradients are kept and added in bf16, and masters as what their bf16
    weights lack: the bytes of bf16 masters without their loss. bf16_optimizer_states: moments in bf16,
    rounded by chance. Both need optimizer offload.
    """

    enabled: bool = False
    check_grad_overflow: bool = True
    immediate_grad_update: bool = False
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


def _module_names(value: Any) -> Any:
    if value == "auto" or (isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)):
        return value
    raise expected('"auto" or a list of module names')


class DataTypesConfig(Section):
    """``data_types``.

    grad_accum_dtype: dtype in which gradients are accumulated; null leaves it to the engine. param_dtype,
    buffer_dtype and a list in keep_in_fp32_modules are refused.
    """

    grad_accum_dtype: OptionalDtype = None
    param_dtype: OptionalDtype = None
    buffer_dtype: OptionalDtype = None
    keep_in_fp32_modules: Annotated[list[str] | Literal["auto"], BeforeValidator(_module_names)] = "auto"


class OptimizerConfig(Section):
    """``optimizer``: an optimizer for the engine to build.

    type: name, in any letter case. params: keyword arguments of its constructor. legacy_fusion: accepted;
    it chose between two fused kernels in DeepSpeed.
    """

    type: str
    params: dict[str, Any] = Field(default_factory=dict)
    legacy_fusion: bool = False


class SchedulerConfig(Section):
    """``scheduler``: a learning-rate schedule for the engine to build.

    type: its name. params: keyword arguments of its constructor.
    """

    type: str
    params: dict[str, Any] = Field(default_factory=dict)


class ParallelWriteConfig(Section):
    """``checkpoint.parallel_write``. pipeline_stage: has no effect without pipeline parallelism."""

    pipeline_stage: bool = False


def _upper_case(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


class CheckpointConfig(Section):
    """``checkpoint``.

    tag_validation: what happens when ranks save under different tags.
    use_node_local_storage: each node has its own file system.
    async_save: training goes on while the host optimizer's state is written; not in DeepSpeed.
    load_universal, writer: refused when on.
    parallel_write, checkpoint_serialization: how DeepSpeed writes; accepted.
    """

    tag_validation: Annotated[Literal["WARN", "IGNORE", "FAIL"], BeforeValidator(_upper_case)] = "WARN"
    use_node_local_storage: bool = False
    async_save: bool = False
    load_universal: bool = False
    parallel_write: ParallelWriteConfig = ParallelWriteConfig()
    checkpoint_serialization: bool = True
    writer: dict[str, Any] | None = None


def _false_to_none(value: Any) -> Any:
    return None if value is False else value


class ActivationCheckpointingConfig(Section):
    """``activation_checkpointing``: defaults for ``deepspeed.checkpointing``; nothing else reads them."""

    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    number_checkpoints: Annotated[Count | None, BeforeValidator(_false_to_none)] = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


class TensorBoardConfig(Section):
    """``tensorboard``, and ``csv_monitor`` with the same keys: where a monitor writes its events."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class WandbConfig(Section):
    """``wandb``: the run to report to."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class CometConfig(Section):
    """``comet``: the experiment to report to."""

    enabled: bool = False
    samples_log_interval: Count = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


class ThroughputTimerConfig(Section):
    """``timers.throughput``: whether samples a second are counted, and whether the device is waited for."""

    enabled: bool = True
    synchronized: bool = True


class TimersConfig(Section):
    """``timers``."""

    throughput: ThroughputTimerConfig = ThroughputTimerConfig()


class AioConfig(Section):
    """``aio``: NVMe transfer settings. Always sent by some clients; without NVMe nothing reads them."""

    block_size: Count = 1 << 20
    queue_depth: Count = 8
    thread_count: Count = 1
    intra_op_parallelism: Count = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


def low_precision_dtype(fp16: FP16Config, bf16: BF16Config) -> torch.dtype:
    """Return the dtype that the engine casts weights to: fp16, bf16, or fp32 when neither is enabled."""
    if fp16.enabled:
        return torch.float16
    return torch.bfloat16 if bf16.enabled else torch.float32
