"""Process groups by role. Data parallelism over all ranks is the only one; any other role has world size 1.

Source: function names of DeepSpeed 0.19.8's deepspeed.utils.groups; a group of None is torch's default group.
"""

from __future__ import annotations

import torch.distributed as dist


def _get_data_parallel_group() -> dist.ProcessGroup | None:
    """Return the data-parallel group: all ranks; None without a process group."""
    return dist.group.WORLD if dist.is_initialized() else None


def _get_data_parallel_world_size() -> int:
    """Return the number of data-parallel ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _get_data_parallel_rank() -> int:
    """Return this process's data-parallel rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def _get_sequence_parallel_group() -> None:
    """Refuse: there is no sequence-parallel group.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        "sequence_parallel_size: expected sequence parallelism to be set up, got none. "
        "It is not here; use data parallelism only."
    )


def _get_sequence_parallel_world_size() -> int:
    """Return 1: sequences are not split."""
    return 1


def _get_sequence_parallel_rank() -> int:
    """Return 0: sequences are not split."""
    return 0


def _get_model_parallel_world_size() -> int:
    """Return 1: models are not split."""
    return 1


def _get_model_parallel_rank() -> int:
    """Return 0: models are not split."""
    return 0
