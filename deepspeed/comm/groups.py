"""Questions about process groups that torch.distributed has no name for."""

from __future__ import annotations

import torch.distributed as dist

from deepspeed.comm.launch_env import read_launch_env


def get_local_rank() -> int:
    """Return the rank of this process on its node, as its launcher said; 0 without a launcher."""
    place = read_launch_env()
    return place.local_rank if place is not None else 0


def get_world_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of a group's members, in group order; of all ranks for None."""
    ranks: list[int] = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    return ranks
