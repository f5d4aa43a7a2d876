"""Page-locked memory of exactly the size asked for.

torch rounds a page-locked block up to a power of two, and pins by copying into it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .host_buffer import HostBuffer, Ledger
from .shapes import Shape

# Below this torch's cache of small blocks is better: a mapping costs a system call and whole pages.
_LEAST_NBYTES = 1 << 20

SHAPES = {
    "_torch_pin_memory": Shape(("self", "tensor"), ("pin_memory",)),
    "_torch_empty_pinned": Shape(("self", "tensor", "shape"), ("new_empty",)),
}


def exact_pin_memory(stocks: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A replacement of an accelerator's `_torch_pin_memory`.

    Args:
        stocks: takes what is small, or not contiguous.
    """

    def _torch_pin_memory(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        fits = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_pinned()
        if not fits or tensor.nbytes < _LEAST_NBYTES:
            return stocks(self, tensor)
        return _pinned(tensor.shape, tensor.dtype).copy_(tensor.detach())

    return _torch_pin_memory


def exact_empty_pinned(stocks: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A replacement of an accelerator's `_torch_empty_pinned`.

    Args:
        stocks: takes what is small.
    """

    def _torch_empty_pinned(self: Any, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
        size = torch.Size(shape)
        if size.numel() * tensor.element_size() < _LEAST_NBYTES:
            return stocks(self, tensor, shape)
        return _pinned(size, tensor.dtype)

    return _torch_empty_pinned


def _pinned(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A page-locked tensor; pageable, with one warning, where the system refuses."""
    buffer = HostBuffer("pinned memory", shape.numel(), dtype, Ledger(), owner="deepspeed_lean")
    buffer.pin()
    return buffer.tensor.view(shape)
