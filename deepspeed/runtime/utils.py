"""Small helpers under DeepSpeed's import path."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from deepspeed.utils.memory import see_memory_usage
from deepspeed.utils.nested import map_tensors

__all__ = ["clip_grad_norm_", "move_to_device", "see_memory_usage"]


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Return nested containers with their tensors on a device.

    Args:
        item: Tensor, list, tuple, dict or anything else, nested at will; only tensors move.
        device: Where to.
        criterion_func: Which tensors to move; all by default.
    """
    return map_tensors(
        item, lambda tensor: tensor.to(device) if criterion_func is None or criterion_func(tensor) else tensor
    )


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """Clip gradients of whole parameters in place and return their norm before, as torch.nn.utils does.

    Args:
        parameters: With gradients in ``.grad``; under an engine, clipping is ``gradient_clipping``'s job.
        max_norm: Largest norm.
        norm_type: Order of the norm, also inf.
        mpu: Accepted for DeepSpeed's signature; the model is whole on every rank.
    """
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
