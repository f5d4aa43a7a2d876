"""The collectives of ZeRO 1 and 2 as functions over a process group; nothing here keeps state.

On gloo a sum is taken in rank order in fp32, so that its bits depend neither on the bucket's extent nor on a
ring's starting point, and every 16-bit type works whatever gloo's own reductions support. Slices are spread
by broadcasts, since torch's all-gather on gloo copies its whole output within gloo's threads, whose C heaps
keep it: measured 112 MiB a rank for outputs of 8 MiB. On NCCL the library does both.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from deepspeed.runtime.zero.host_buffer import mapped_tensor

# Rows are summed this many elements at a time, so that the fp32 temporary stays in cache.
_SUM_TILE_NUMEL = 1 << 18

# torch 2.13 renamed it and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Wait = Callable[[], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Comm:
    """A data-parallel process group as seen by one of its ranks."""

    group: dist.ProcessGroup | None  # None: a single process without torch.distributed
    rank: int
    world: int
    on_host: bool  # gloo: buffers are host tensors, reduced by us

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Comm:
        """Describe a group; without an initialized torch.distributed, a world of one."""
        if not dist.is_initialized():
            return cls(None, 0, 1, True)
        on_host = "nccl" not in dist.get_backend(group)
        comm = cls(group, dist.get_rank(group), dist.get_world_size(group), on_host)
        if on_host:
            atexit.register(_let_go, weakref.ref(comm))
        return comm

    def global_rank(self, rank: int) -> int:
        """A group rank as torch.distributed's root arguments want it."""
        return dist.get_global_rank(self.group, rank) if self.group is not None else rank


def _let_go(reference: weakref.ref[Comm]) -> None:
    """Hold the group no longer, at the interpreter's exit: a client may still hold the optimizer."""
    comm = reference()
    if comm is not None:
        object.__setattr__(comm, "group", None)


def launch_reduce_mean(flat: torch.Tensor, owner_bounds: Sequence[int], comm: Comm) -> Wait:
    """Start reducing each owner's slice of a bucket to its owner.

    Args:
        flat: `[owner_bounds[-1]]` floating, the bucket. The own slice is overwritten with the mean over
            ranks; the rest is undefined afterwards.
        owner_bounds: `[world + 1]`, owner r's slice is `[owner_bounds[r], owner_bounds[r + 1])`.
        comm: the ranks.

    Returns:
        A function to call once; after it the mean is in place (on NCCL: in stream order).
    """
    if comm.world == 1:
        return _nothing_to_wait_for
    if not comm.on_host:
        works = [
            dist.reduce(
                flat[low:high], comm.global_rank(owner), dist.ReduceOp.AVG, group=comm.group, async_op=True
            )
            for owner, (low, high) in enumerate(zip(owner_bounds, owner_bounds[1:], strict=False))
            if high > low
        ]
        return partial(_wait_all, works)
    counts = [high - low for low, high in zip(owner_bounds, owner_bounds[1:], strict=False)]
    own = flat[owner_bounds[comm.rank] : owner_bounds[comm.rank + 1]]
    return _launch_exchange_and_sum(flat, counts, own, comm)


def launch_all_reduce_mean(flat: torch.Tensor, comm: Comm) -> Wait:
    """Start averaging a whole bucket on every rank (stage 0).

    Args:
        flat: `[numel]` floating; overwritten with the mean.
        comm: the ranks.

    Returns:
        A function to call once; after it the mean is in place (on NCCL: in stream order).
    """
    if comm.world == 1:
        return _nothing_to_wait_for
    if not comm.on_host:
        work = dist.all_reduce(flat, dist.ReduceOp.AVG, group=comm.group, async_op=True)
        return partial(_wait_all, [work])
    part = -(-flat.numel() // comm.world)
    bounds = [min(rank * part, flat.numel()) for rank in range(comm.world + 1)]
    counts = [high - low for low, high in zip(bounds, bounds[1:], strict=False)]
    own = flat[bounds[comm.rank] : bounds[comm.rank + 1]]
    wait_sum = _launch_exchange_and_sum(flat, counts, own, comm)

    def wait() -> None:
        wait_sum()
        _launch_spread(flat, bounds, comm)()

    return wait


def launch_all_gather(gathered: torch.Tensor, own: torch.Tensor, comm: Comm) -> Wait:
    """Start collecting every rank's equal part.

    Args:
        gathered: `[world * n]`, receives the parts in rank order.
        own: `[n]`, this rank's part, same dtype.
        comm: the ranks.

    Returns:
        A function to call once; after it `gathered` is complete (on NCCL: in stream order).
    """
    if not comm.on_host:
        work = _all_gather(gathered.view(torch.uint8), own.view(torch.uint8), group=comm.group, async_op=True)
        return partial(_wait_all, [work])
    bounds = [rank * own.numel() for rank in range(comm.world + 1)]
    gathered[bounds[comm.rank] : bounds[comm.rank + 1]].copy_(own)
    return _launch_spread(gathered, bounds, comm)


def all_reduce_sum(values: Sequence[float], comm: Comm, device: torch.device) -> list[float]:
    """Sum a few numbers over ranks in double precision: the step's one decision.

    Args:
        values: numbers of this rank.
        comm: the ranks.
        device: where the backend wants its tensors.

    Returns:
        The sums, the same bits on every rank.
    """
    if comm.world == 1:
        return list(values)
    packed = torch.tensor(values, dtype=torch.float64, device="cpu" if comm.on_host else device)
    dist.all_reduce(packed, group=comm.group)
    return packed.tolist()


def gather_objects(value: T, comm: Comm) -> list[T]:
    """Collect a picklable value of every rank, in rank order."""
    if comm.world == 1:
        return [value]
    values: list[Any] = [None] * comm.world
    dist.all_gather_object(values, value, group=comm.group)
    return values


def broadcast(tensor: torch.Tensor, owner: int, comm: Comm) -> None:
    """Copy the owner's contiguous tensor to every rank, in place."""
    if comm.world > 1 and tensor.numel():
        dist.broadcast(tensor.view(-1).view(torch.uint8), comm.global_rank(owner), group=comm.group)


def _launch_spread(flat: torch.Tensor, bounds: Sequence[int], comm: Comm) -> Wait:
    """Send every rank's slice of `flat`, `[bounds[rank], bounds[rank + 1])`, to all others, in place."""
    # Bytes, because gloo moves some element types and not others.
    works = [
        dist.broadcast(
            flat[low:high].view(torch.uint8), comm.global_rank(owner), group=comm.group, async_op=True
        )
        for owner, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False))
        if high > low
    ]
    return partial(_wait_all, works)


def _launch_exchange_and_sum(flat: torch.Tensor, counts: list[int], own: torch.Tensor, comm: Comm) -> Wait:
    """Send each owner its slice, then average the received rows into `own`."""
    rows = mapped_tensor("rows", comm.world * own.numel(), flat.dtype)
    itemsize = flat.element_size()
    work = dist.all_to_all_single(
        rows.view(torch.uint8),
        flat.view(torch.uint8),
        [own.numel() * itemsize] * comm.world,
        [count * itemsize for count in counts],
        group=comm.group,
        async_op=True,
    )

    def wait() -> None:
        work.wait()
        _mean_of_rows(rows.view(comm.world, -1), own)

    return wait


def _mean_of_rows(rows: torch.Tensor, mean: torch.Tensor) -> None:
    """Average rows in order, in fp32 (fp64 for fp64), rounding once into `mean`."""
    wide = torch.float64 if mean.dtype == torch.float64 else torch.float32
    for start in range(0, mean.numel(), _SUM_TILE_NUMEL):
        tile = rows[:, start : start + _SUM_TILE_NUMEL]
        total = tile[0].to(wide, copy=True)
        for row in tile[1:]:
            total += row
        mean[start : start + _SUM_TILE_NUMEL] = total.div_(rows.shape[0])


def _wait_all(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _nothing_to_wait_for() -> None:
    """A world of one has nothing in flight."""
