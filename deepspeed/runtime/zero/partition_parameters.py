"""ZeRO-3's public names.

Parameters are never partitioned here, so what asks for it is refused and the rest is a no-op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from types import TracebackType
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.utils.unsupported import refuse

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "get_accelerator",
    "register_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

_FEATURE = "ZeRO stage 3"
_INSTEAD = "Set zero_optimization.stage to 2 or less; optimizer states go to the host with offload_optimizer."

_orig_torch_arange = torch.arange


class ZeroParamStatus(Enum):
    """Where a ZeRO-3 parameter is; clients compare members, no parameter here carries one."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class _NoOpContext:
    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""


class Init(_NoOpContext):
    """Context in which ZeRO-3 would partition new parameters. Without ``enabled`` it does nothing.

    Args:
        enabled: False makes a no-op. Everything else belongs to ZeRO-3.

    Raises:
        NotImplementedError: ``enabled`` is true.

    Source: argument names of DeepSpeed 0.19.8.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **kwargs: Any,
    ) -> None:
        if enabled:
            refuse("deepspeed.zero.Init", _FEATURE, _INSTEAD)


class GatheredParameters(_NoOpContext):
    """Context in which ZeRO-3 would hold whole parameters.

    Parameters are always whole here, so it does nothing, as DeepSpeed's does for parameters that ZeRO-3 did
    not partition: nothing is gathered, and nothing is broadcast from ``modifier_rank``.
    """

    def __init__(
        self,
        params: torch.nn.Parameter | Iterable[torch.nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        super().__init__()


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Do nothing: a parameter used outside its module needs care only when ZeRO-3 partitions it."""


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype, target_device: Any = None
) -> Callable[..., torch.Tensor]:
    """Refuse: ZeRO-3 wraps tensor constructors with this.

    Raises:
        NotImplementedError: Always.
    """
    refuse("zero_wrapper_for_fp_tensor_constructor", _FEATURE, _INSTEAD)
