"""Helpers for saving state dicts."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.utils.nested import map_tensors

__all__ = ["clone_tensors_for_torch_save"]


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return nested containers with every tensor cloned, so that torch.save writes its elements and no more.

    A tensor that is a view drags its whole storage into a file. Clones are plain tensors, detached, each with
    a storage of its own; other objects are passed on as they are.

    Args:
        item: Tensor, list, tuple, dict or anything else, nested at will.
        device: Where the clones live.

    Returns:
        The same structure; containers keep their type.
    """
    return map_tensors(item, lambda tensor: tensor.detach().to(device, copy=True))
