"""Tensor parallelism by injection, which is not here; ``layers`` holds the names that clients import."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.module_inject import layers
from deepspeed.utils.unsupported import refuse

__all__ = ["layers", "tp_model_init"]


def tp_model_init(
    model: torch.nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **kwargs: Any
) -> torch.nn.Module:
    """Return the model as it is for a tensor-parallel size of 1.

    Args:
        model: The model.
        tp_size: Ranks that share a model.
        dtype: Accepted; the engine casts.
        config: Accepted.
        kwargs: Accepted.

    Raises:
        NotImplementedError: A size over 1.
    """
    if tp_size > 1:
        refuse(
            "tp_model_init",
            f"tensor parallelism (tp_size {tp_size})",
            "Use data parallelism only: tp_size 1.",
        )
    return model
