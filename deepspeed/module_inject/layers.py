"""Names of tensor-parallel layers that clients import."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch

from deepspeed.utils.unsupported import refuse


class GatherReplacedLayerParams:
    """Context in which tensor-parallel parameters would be whole. They always are here, so it does nothing.

    Args:
        params: Parameters to gather.
        module: The model that they are of.
        enabled: Whether to gather at all.

    Raises:
        NotImplementedError: ``enabled`` is true and the module has tensor-parallel layers to gather.
    """

    def __init__(
        self, params: torch.Tensor | Iterable[torch.Tensor], module: torch.nn.Module, enabled: bool = True
    ) -> None:
        if enabled and any(getattr(part, "mp_group", None) is not None for part in module.modules()):
            refuse("GatherReplacedLayerParams", "tensor parallelism", "Use data parallelism only.")

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""
