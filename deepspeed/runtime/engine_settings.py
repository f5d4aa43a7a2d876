"""What an engine answers about its configuration, and the calls of stock that belong to other stages."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils.unsupported import refuse

__all__ = ["AbsentCalls", "ConfigCalls"]


class ConfigCalls:
    """The configuration under the names of stock's methods; mixed into the engine."""

    _config: DeepSpeedConfig

    @property
    def config(self) -> Any:
        """The configuration mapping as it was passed."""
        return self._config.raw

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return int(self._config.zero_optimization.stage)

    def zero_optimization(self) -> bool:
        """Whether anything is partitioned."""
        return self.zero_optimization_stage() > 0

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the optimizer lives on the host."""
        return self._config.zero_optimization.offloads_optimizer

    def zero_offload_optimizer(self) -> Any:
        """The section `zero_optimization.offload_optimizer`, or None."""
        return self._config.zero_optimization.offload_optimizer

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """A key of stage 3, as it was set; below it every rank has whole weights."""
        return self._config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def train_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self._config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-batch on one rank."""
        return self._config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one optimizer step."""
        return self._config.gradient_accumulation_steps

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts micro-batches; otherwise every `step` steps the optimizer."""
        return self._config.managed_gradient_accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step, samples of a micro-batch on one rank, micro-batches of a step."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def gradient_clipping(self) -> float:
        """Largest gradient norm; 0 for no clipping."""
        return self._config.gradient_clipping

    def fp16_enabled(self) -> bool:
        """Whether the model runs in fp16 with loss scaling."""
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether the model runs in bf16."""
        return self._config.bf16.enabled

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale of fp16 follows the overflows."""
        return self._config.fp16.dynamic_loss_scale

    def optimizer_name(self) -> str | None:
        """Type of the optimizer that the configuration names."""
        return self._config.optimizer.type if self._config.optimizer is not None else None

    def scheduler_name(self) -> str | None:
        """Type of the schedule that the configuration names."""
        return self._config.scheduler.type if self._config.scheduler is not None else None

    def steps_per_print(self) -> float | None:
        """Steps between progress lines."""
        return self._config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether the parts of each micro-batch are timed."""
        return self._config.wall_clock_breakdown

    def dump_state(self) -> bool:
        """Whether the configuration was logged at the start."""
        return self._config.dump_state


class AbsentCalls:
    """Calls of stock that are not here: each says what to do instead; mixed into the engine."""

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Raise NotImplementedError."""
        refuse(
            "set_train_batch_size",
            f"another batch size ({train_batch_size}) for a running engine",
            "Call engine.set_gradient_accumulation_boundary before each backward, or initialize again.",
        )

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Raise NotImplementedError."""
        refuse(
            "set_train_micro_batch_size",
            f"another micro-batch size ({micro_batch_size}) for a running engine",
            "Feed batches of any size; the key only counts samples.",
        )

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        refuse("_zero3_consolidated_16bit_state_dict", "ZeRO stage 3", "Use engine.module.state_dict().")

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        refuse("_consolidated_16bit_state_dict", "stage 3 or tensor parallelism", "Use module.state_dict().")
