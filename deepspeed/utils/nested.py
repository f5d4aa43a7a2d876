"""Walking nested containers of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch


def map_tensors(item: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return nested containers with a function applied to every tensor.

    Args:
        item: Tensor, list, tuple, named tuple, dict or anything else, nested at will.
        function: What to make of a tensor.

    Returns:
        New containers of the same types; what is no container and no tensor is passed on as it is.
    """
    if isinstance(item, torch.Tensor):
        return function(item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(map_tensors(part, function) for part in item))
    if isinstance(item, (list, tuple)):
        return type(item)(map_tensors(part, function) for part in item)
    if isinstance(item, dict):
        made = copy.copy(item)
        for key, part in item.items():
            made[key] = map_tensors(part, function)
        return made
    return item
