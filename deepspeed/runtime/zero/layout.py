"""Where every element of every parameter lies: pure arithmetic, no process group, no device.

Glossary, used throughout the package:

========== ==========================================================================================
full       all elements of a parameter group, in order, without padding
shard      the contiguous part of a group that one rank owns
padded     `full` rounded up so that every rank's shard has the same extent; padding exists in
           collectives only, never in host memory
param      the low-precision weight that the model computes with
master     its fp32 original, owned by one rank
grad       the gradient of a param, or its reduced mean once it reaches a shard
flat       one-dimensional; a group's params one after the other
bucket     the unit of gradient reduction: whole params, of any group, in one flat device buffer
chunk      the unit of the optimizer step and of publishing: a range of a shard
numel      a count of elements; `nbytes` is a count of bytes; there is no bare "size"
========== ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# A group is padded to a multiple of this many elements a rank, as stock does, so that the files of both line
# up.
ALIGNMENT_NUMEL_PER_RANK = 2


@dataclass(frozen=True)
class ParamSlot:
    """One parameter's place: `[start, end)` of its group's flat buffer."""

    index: int  # position in model order, over all groups; unique
    group: int  # which parameter group
    start: int  # first element in the group's flat buffer
    numel: int

    @property
    def end(self) -> int:
        """One past the last element in the group's flat buffer."""
        return self.start + self.numel


class Segment(NamedTuple):
    """A run of elements of one parameter inside a larger flat range."""

    slot: ParamSlot
    param_start: int  # first element inside the flattened parameter
    offset: int  # first element inside the flat range that was asked for
    numel: int


@dataclass(frozen=True)
class GroupLayout:
    """One parameter group, flat, and cut into equal contiguous shards.

    Args:
        slots: the group's non-empty trainable parameters in order.
        shards: number of ranks that share the group (1: every rank owns all of it).
    """

    slots: tuple[ParamSlot, ...]
    shards: int

    @cached_property
    def full_numel(self) -> int:
        """Elements of the group without padding."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def shard_extent(self) -> int:
        """Elements of one shard, padding included; the same on every rank."""
        unit = ALIGNMENT_NUMEL_PER_RANK * self.shards
        return -(-self.full_numel // unit) * ALIGNMENT_NUMEL_PER_RANK

    @property
    def padded_numel(self) -> int:
        """Elements of all shards together."""
        return self.shard_extent * self.shards

    def shard_bounds(self, shard: int) -> tuple[int, int]:
        """The owned flat range `[start, end)` of a shard, without padding; may be empty."""
        start = min(shard * self.shard_extent, self.full_numel)
        return start, min(start + self.shard_extent, self.full_numel)

    def shard_numel(self, shard: int) -> int:
        """Elements that a shard owns, without padding."""
        start, end = self.shard_bounds(shard)
        return end - start

    def segments(self, start: int, end: int) -> Iterator[Segment]:
        """The parameters' parts inside the flat range `[start, end)`, in order; padding belongs to none."""
        for slot in self.slots[self._first_slot_after(start) :]:
            if slot.start >= end:
                return
            low, high = max(start, slot.start), min(end, slot.end)
            yield Segment(slot, low - slot.start, low - start, high - low)

    def _first_slot_after(self, start: int) -> int:
        """Index of the first slot that ends behind `start` (binary search)."""
        low, high = 0, len(self.slots)
        while low < high:
            middle = (low + high) // 2
            if self.slots[middle].end <= start:
                low = middle + 1
            else:
                high = middle
        return low


class BucketItem(NamedTuple):
    """A run of one parameter's gradient inside a bucket, owned by one shard."""

    slot: ParamSlot
    param_start: int  # first element inside the flattened gradient
    numel: int
    bucket_start: int  # first element inside the bucket
    owner: int  # shard that owns the run
    shard_start: int  # first element inside the owner's shard of the group


@dataclass(frozen=True)
class BucketPlan:
    """What one bucket holds and who owns which slice of it; fixed by layout, never by arrival order."""

    index: int  # position in launch order
    slots: tuple[ParamSlot, ...]
    items: tuple[BucketItem, ...]  # sorted by owner; one owner's items are contiguous
    owner_bounds: tuple[int, ...]  # [shards + 1]; owner r's slice is [owner_bounds[r], owner_bounds[r + 1])

    @property
    def numel(self) -> int:
        """Elements in the bucket."""
        return self.owner_bounds[-1]


def plan_groups(numels: Sequence[Sequence[tuple[int, int]]], shards: int) -> list[GroupLayout]:
    """Lay every parameter group out flat.

    Args:
        numels: for each group, `(model index, numel)` of its parameters in order; empty parameters are left
            out by the caller, like frozen ones.
        shards: ranks that share each group.

    Returns:
        One layout a group; a group may be empty.
    """
    groups = []
    for group, members in enumerate(numels):
        slots, start = [], 0
        for index, numel in members:
            slots.append(ParamSlot(index, group, start, numel))
            start += numel
        groups.append(GroupLayout(tuple(slots), shards))
    return groups


def plan_buckets(groups: Sequence[GroupLayout], bucket_numel: int) -> list[BucketPlan]:
    """Cut all parameters into reduction buckets.

    Whole parameters in reverse model order, because the backward pass produces gradients roughly in that
    order. A parameter larger than `bucket_numel` gets a bucket of its own.

    Args:
        groups: the parameter groups' layouts.
        bucket_numel: most elements of a bucket with more than one parameter.
    """
    slots = sorted((slot for group in groups for slot in group.slots), key=lambda slot: -slot.index)
    batches: list[list[ParamSlot]] = []
    filled = 0
    for slot in slots:
        if not batches or filled + slot.numel > bucket_numel:
            batches.append([])
            filled = 0
        batches[-1].append(slot)
        filled += slot.numel
    return [_plan_bucket(index, batch, groups) for index, batch in enumerate(batches)]


def _plan_bucket(index: int, slots: Sequence[ParamSlot], groups: Sequence[GroupLayout]) -> BucketPlan:
    """Order the parameters' runs by owner."""
    shards = groups[0].shards
    by_owner: list[list[tuple[ParamSlot, int, int]]] = [[] for _ in range(shards)]
    for slot in slots:
        group = groups[slot.group]
        for owner in range(slot.start // group.shard_extent, (slot.end - 1) // group.shard_extent + 1):
            shard_start, shard_end = group.shard_bounds(owner)
            by_owner[owner].append((slot, max(slot.start, shard_start), min(slot.end, shard_end)))
    items, bounds, filled = [], [0], 0
    for owner, runs in enumerate(by_owner):
        for slot, low, high in runs:
            shard_start = groups[slot.group].shard_bounds(owner)[0]
            items.append(BucketItem(slot, low - slot.start, high - low, filled, owner, low - shard_start))
            filled += high - low
        bounds.append(filled)
    return BucketPlan(index, tuple(slots), tuple(items), tuple(bounds))
