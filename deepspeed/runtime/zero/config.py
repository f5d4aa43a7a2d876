"""``zero_optimization``: which states are partitioned, where they live, and how gradients travel."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from deepspeed.runtime.config_base import Count, NonNegativeNumber, PositiveCount, Section, expected
from deepspeed.runtime.zero.offload_config import (
    OffloadDeviceEnum,
    OffloadOptimizerConfig,
    OffloadParamConfig,
)

DEFAULT_BUCKET_NUMEL = 500_000_000


class ZeroStageEnum(IntEnum):
    """ZeRO stages under DeepSpeed's names. Stage 3 is known only to be refused by name."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


def _stage(value: Any) -> Any:
    if isinstance(value, bool) or str(value) not in ("0", "1", "2", "3", "0.0", "1.0", "2.0", "3.0"):
        raise expected("0, 1 or 2", "Stage 2 partitions optimizer states and gradients.")
    return int(float(value))


class CommunicationKeys(Section):
    """How gradients and weights travel.

    reduce_bucket_numel: elements in one gradient bucket. allgather_bucket_numel: elements gathered at once.
    overlap_comm: reduce while backward goes on; null means DeepSpeed's default, off below stage 3.
    round_robin_gradients, contiguous_gradients, reduce_scatter, allgather_partitions, parameter_alignment and
    use_multi_rank_bucket_allreduce choose between implementations of the same arithmetic in DeepSpeed;
    here there is one implementation and any value is accepted.
    """

    reduce_bucket_numel: PositiveCount = Field(default=DEFAULT_BUCKET_NUMEL, alias="reduce_bucket_size")
    allgather_bucket_numel: PositiveCount = Field(default=DEFAULT_BUCKET_NUMEL, alias="allgather_bucket_size")
    overlap_comm: bool | None = None
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    allgather_partitions: bool = True
    use_multi_rank_bucket_allreduce: bool = True
    round_robin_gradients: bool = False
    parameter_alignment: bool = False


class BehaviourKeys(Section):
    """What the optimizer does beside stepping.

    ignore_unused_parameters: false makes a parameter without gradient an error.
    compute_grad_norm: false leaves the norm out when nothing needs it.
    load_from_fp32_weights: a checkpoint's fp32 masters win over its 16-bit weights.
    elastic_checkpoint, legacy_stage1: DeepSpeed's old formats, refused when on. zenflow: refused.
    """

    ignore_unused_parameters: bool = True
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    legacy_stage1: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    zenflow: dict[str, Any] | None = None


class Stage3Keys(Section):
    """Sizes that only stage 3 reads. Presets carry them at every stage; they are accepted without effect."""

    sub_group_size: NonNegativeNumber = 1e9
    stage3_prefetch_bucket_size: NonNegativeNumber = 5e7
    stage3_param_persistence_threshold: NonNegativeNumber = 1e5
    stage3_model_persistence_threshold: NonNegativeNumber = float(2**63 - 1)
    stage3_max_live_parameters: NonNegativeNumber = 1e9
    stage3_max_reuse_distance: NonNegativeNumber = 1e9
    stage3_module_granularity_threshold: NonNegativeNumber = 0.0
    leaf_module: dict[str, Any] | None = None


class Stage3Switches(Section):
    """Switches that only stage 3 reads, accepted without effect; those of ZeRO++ and MiCS are refused."""

    stage3_gather_16bit_weights_on_model_save: bool = False
    stage3_use_all_reduce_for_fetch_params: bool = False
    stage3_allgather_sequential: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    zero_hpz_partition_size: Count = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    mics_shard_size: int = -1
    mics_hierarchical_params_gather: bool = False
    zeropp_loco_param: dict[str, Any] | None = None


class DeepSpeedZeroConfig(CommunicationKeys, BehaviourKeys, Stage3Keys, Stage3Switches):
    """The ``zero_optimization`` object.

    stage: 0 (off), 1 (optimizer states partitioned) or 2 (gradients too).
    offload_optimizer: takes effect at stages 1 and 2. offload_param: would take effect at stage 3 only.
    """

    stage: Annotated[ZeroStageEnum, BeforeValidator(_stage)] = ZeroStageEnum.disabled
    offload_optimizer: OffloadOptimizerConfig | None = None
    offload_param: OffloadParamConfig | None = None

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer lives on the host: stage 1 or 2, with ``offload_optimizer.device`` "cpu"."""
        offload = self.offload_optimizer
        return self.stage > 0 and offload is not None and offload.device is OffloadDeviceEnum.cpu

    @property
    def pins_staging(self) -> bool:
        """Whether staging buffers are page-locked: offload is in effect and its ``pin_memory`` is on."""
        return (
            self.offloads_optimizer
            and self.offload_optimizer is not None
            and self.offload_optimizer.pin_memory
        )
