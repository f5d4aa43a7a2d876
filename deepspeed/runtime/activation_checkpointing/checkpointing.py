"""Activation checkpointing: torch.utils.checkpoint under DeepSpeed's names.

Settings are the process's, as in DeepSpeed: ``configure`` replaces them, ``reset`` clears what lives from one
iteration to the next, which is nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from deepspeed.runtime.config_source import read_config
from deepspeed.utils.unsupported import refuse

__all__ = ["CheckpointSettings", "checkpoint", "configure", "is_configured", "reset"]


@dataclass(frozen=True)
class CheckpointSettings:
    """cpu: inputs kept for recomputation wait on the host.

    Partitioning and contiguity need model parallelism.
    """

    cpu: bool = False


_SETTINGS: ContextVar[CheckpointSettings | None] = ContextVar(
    "deepspeed_activation_checkpointing", default=None
)


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how ``checkpoint`` works.

    Args:
        mpu_: Model-parallel unit; its model-parallel world must be 1.
        deepspeed_config: What ``deepspeed.initialize`` takes as configuration; its section
            ``activation_checkpointing`` is read, and arguments given here win.
        partition_activations: Accepted: over a model-parallel world of 1 a partition is the whole.
        contiguous_checkpointing: Accepted: a layout of partitioned activations.
        num_checkpoints: Accepted: the size of that layout.
        checkpoint_in_cpu: Keep inputs on the host until backward.
        synchronize: Accepted; nothing here needs it.
        profile: Accepted; use torch.profiler.

    Raises:
        NotImplementedError: The model is split over ranks.
    """
    if mpu_ is not None and mpu_.get_model_parallel_world_size() > 1:
        refuse("checkpointing.configure", "model parallelism", "Use data parallelism only.")
    config = read_config(deepspeed_config) if deepspeed_config is not None else {}
    section = config.get("activation_checkpointing", {})
    cpu = section.get("cpu_checkpointing", False) if checkpoint_in_cpu is None else checkpoint_in_cpu
    _SETTINGS.set(CheckpointSettings(cpu=bool(cpu)))


def is_configured() -> bool:
    """Return whether ``configure`` was called."""
    return _SETTINGS.get() is not None


def reset() -> None:
    """Do nothing: no buffers live from one iteration to the next."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function and keep its inputs instead of its activations; backward computes them again.

    Args:
        function: What to call.
        args: Its arguments.
        kwargs: Its keyword arguments; refused together with checkpoint_in_cpu.

    Returns:
        What the function returns.
    """
    settings = _SETTINGS.get() or CheckpointSettings()
    if not settings.cpu:
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    with torch.autograd.graph.save_on_cpu():
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=True, **kwargs)
