"""Keys of known sections whose value DeepSpeed accepts and this package refuses, by full path.

A value that gets implemented loses its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from deepspeed.runtime.config_problems import Problems
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum


class Refusal(NamedTuple):
    """One key of a known section: the values that are refused, what is expected instead, what to do."""

    path: str
    is_refused: Callable[[Any], bool]
    constraint: str
    advice: str


_STAGE_2 = (
    'Use stage 2 with "offload_optimizer": {"device": "cpu"}: optimizer and gradients live on the host.'
)
_ZERO_PP = "ZeRO++ belongs to stage 3; leave the key out."
_MONITOR = "Use csv_monitor, tensorboard or wandb."
_DTYPE = 'Use "bf16": {"enabled": true} or "fp16": {"enabled": true}.'
_CAST = "Cast in the training script, after deepspeed.initialize."
_NO_NVME = 'NVMe offload is not available here; use "cpu".'
_NO_PARAM_NVME = 'NVMe offload is not available here; use "none".'


def _is_nvme(value: Any) -> bool:
    return value is OffloadDeviceEnum.nvme


def _given(value: Any) -> bool:
    return value is not None


REFUSED_KEYS: tuple[Refusal, ...] = (
    Refusal("zero_optimization.stage", lambda stage: stage is ZeroStageEnum.weights, "0, 1 or 2", _STAGE_2),
    Refusal("zero_optimization.offload_optimizer.device", _is_nvme, '"none" or "cpu"', _NO_NVME),
    Refusal("zero_optimization.offload_param.device", _is_nvme, '"none"', _NO_PARAM_NVME),
    Refusal(
        "zero_optimization.offload_optimizer.ratio",
        lambda ratio: ratio != 1.0,
        "1.0",
        "The whole optimizer is offloaded below stage 3; leave the key out.",
    ),
    Refusal("zero_optimization.offload_optimizer.super_offload", bool, "false", "Leave the key out."),
    Refusal(
        "zero_optimization.zenflow",
        _given,
        "no such section",
        "Leave it out; the offloaded step is fused already.",
    ),
    Refusal("zero_optimization.zero_hpz_partition_size", lambda size: size > 1, "1", _ZERO_PP),
    Refusal("zero_optimization.zero_quantized_weights", bool, "false", _ZERO_PP),
    Refusal("zero_optimization.zero_quantized_nontrainable_weights", bool, "false", _ZERO_PP),
    Refusal("zero_optimization.zero_quantized_gradients", bool, "false", _ZERO_PP),
    Refusal(
        "zero_optimization.mics_shard_size",
        lambda size: size > 0,
        "-1",
        "MiCS belongs to stage 3; leave the key out.",
    ),
    Refusal("zero_optimization.mics_hierarchical_params_gather", bool, "false", "MiCS belongs to stage 3."),
    Refusal("zero_optimization.zeropp_loco_param", _given, "no such section", _ZERO_PP),
    Refusal(
        "zero_optimization.elastic_checkpoint",
        bool,
        "false",
        "Any number of ranks can load a checkpoint without it.",
    ),
    Refusal(
        "zero_optimization.legacy_stage1", bool, "false", "Leave the key out; stage 1 has one implementation."
    ),
    Refusal("fp16.fp16_master_weights_and_grads", bool, "false", "Leave the key out; masters are fp32."),
    Refusal("data_types.param_dtype", _given, "null", _DTYPE),
    Refusal("data_types.buffer_dtype", _given, "null", _CAST),
    Refusal("data_types.keep_in_fp32_modules", lambda names: names not in ("auto", []), '"auto"', _CAST),
    Refusal(
        "gradient_allreduce_op",
        lambda op: op == "sum",
        '"mean"',
        "Multiply the loss by the world size for a sum.",
    ),
    Refusal("use_data_before_expert_parallelism", bool, "false", "Expert parallelism is not available here."),
    Refusal(
        "sequence_parallel_size", lambda size: size > 1, "1", "Sequence parallelism is not available here."
    ),
    Refusal(
        "checkpoint.load_universal", bool, "false", "Load the ordinary checkpoint; any number of ranks can."
    ),
    Refusal(
        "checkpoint.writer", _given, "null", "Leave the key out; checkpoints are written with torch.save."
    ),
    Refusal("comet.enabled", bool, "false", _MONITOR),
)


def refuse_keys(values: Mapping[str, Any], problems: Problems) -> None:
    """Report refused values in validated sections.

    Args:
        values: Top-level key to validated section or plain value; keys that failed validation are absent.
        problems: Collects the refusals.
    """
    for refusal in REFUSED_KEYS:
        value: Any = values
        for name in refusal.path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
            if value is None:
                break
        if value is not None and refusal.is_refused(value):
            shown = value.value if isinstance(value, Enum) else value
            problems.refuse(refusal.path, refusal.constraint, shown, refusal.advice)
