"""The accelerators of this host."""

from __future__ import annotations

import os

__all__ = ["VISIBLE", "accelerator_count", "local_slots"]

VISIBLE = "CUDA_VISIBLE_DEVICES"


def accelerator_count() -> int:
    """Return the number of accelerators of this host; 0 when it trains on the CPU."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    return 0 if accelerator.device_name() == "cpu" else accelerator.device_count()


def local_slots(num_gpus: int) -> list[int]:
    """Return this host's devices: those that CUDA_VISIBLE_DEVICES names, else all.

    Args:
        num_gpus: How many processes a host without devices runs; 1 if less.
    """
    count = accelerator_count()
    if count == 0:
        return list(range(max(1, num_gpus)))
    visible = os.environ.get(VISIBLE, "")
    if visible and all(number.strip().isdigit() for number in visible.split(",")):
        return [int(number) for number in visible.split(",")]
    return list(range(count))
