"""From a shard's fresh low-precision weights to every rank's parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from deepspeed.runtime.zero import collectives
from deepspeed.runtime.zero.collectives import Comm, Wait
from deepspeed.runtime.zero.host_buffer import mapped_tensor
from deepspeed.runtime.zero.layout import GroupLayout, Segment

# One that is being computed and one that waits for it. A ring has a slot more, for the one that travels, and
# those that are read ahead.
OPEN_CHUNKS = 2


class Target(NamedTuple):
    """Where the weights of the shard's elements `[start, end)` are to be written."""

    start: int
    end: int
    out: torch.Tensor  # [end - start] the params' dtype


@dataclass(frozen=True)
class Chunk:
    """A part of a shard between `open_chunk` and `close_chunk`.

    Args:
        targets: places that together hold the chunk's owned elements, to be written before `close_chunk`.
    """

    targets: Sequence[Target]
    # Waits until the targets hold the present weights; None if they do, or need not.
    filled: Wait | None = None


class Publisher(Protocol):
    """Opens chunks for writing and brings what was written to the parameters.

    Every rank opens and closes the same chunks in the same order, also those that lie wholly in its padding.
    `reads_ahead + OPEN_CHUNKS` may be open at a time; they are closed in the order in which they were opened.
    """

    # Chunks to open before one is written, because opening starts to read the weights that it holds now.
    reads_ahead: int

    def chunks(self, group: int) -> Iterator[tuple[int, int]]:
        """Chunk bounds `(start, end)` over the group's shard, padding included."""

    def open_chunk(self, group: int, start: int, end: int) -> Chunk:
        """Make room for a chunk."""

    def close_chunk(self, chunk: Chunk) -> None:
        """The chunk has been written; it may travel now."""

    def finish(self) -> None:
        """After this every parameter is fresh (on a device: in the current stream's order)."""


def publish_all(publisher: Publisher, groups: int, write: Callable[[int, Target], Wait | None]) -> None:
    """Walk every chunk of every group once.

    While a chunk is being computed elsewhere, the next one waits there already, so that nobody pauses; this
    thread meanwhile launches the transfers of the chunk before, which from pageable memory takes as long as
    the copy.

    Args:
        publisher: where the weights go.
        groups: how many parameter groups.
        write: writes a target of a group; returns None when it is done, or what waits for it.
    """
    walk = _Walk(publisher, write)
    for group in range(groups):
        for start, end in publisher.chunks(group):
            walk.opened.append((group, publisher.open_chunk(group, start, end)))
            if len(walk.opened) > publisher.reads_ahead:
                walk.write_next()
    while walk.opened:
        walk.write_next()
    while walk.unwritten:
        walk.close_next()
    publisher.finish()


class _Walk:
    """The chunks under way of one walk, in order: opened, then being written, then closed."""

    def __init__(self, publisher: Publisher, write: Callable[[int, Target], Wait | None]) -> None:
        self._publisher = publisher
        self._write = write
        self.opened: deque[tuple[int, Chunk]] = deque()
        self.unwritten: deque[tuple[Chunk, list[Wait]]] = deque()

    def write_next(self) -> None:
        """Have the oldest opened chunk written; close what is done, or has waited long enough."""
        group, chunk = self.opened.popleft()
        if chunk.filled is not None:
            chunk.filled()
        waits = [self._write(group, target) for target in chunk.targets]
        self.unwritten.append((chunk, [wait for wait in waits if wait is not None]))
        # A chunk that is written already is closed at once, so that it travels as early as it can.
        while self.unwritten and (len(self.unwritten) == OPEN_CHUNKS or not self.unwritten[0][1]):
            self.close_next()

    def close_next(self) -> None:
        """Wait until the oldest chunk is written, and close it."""
        chunk, waits = self.unwritten.popleft()
        for wait in waits:
            wait()
        self._publisher.close_chunk(chunk)


@dataclass(frozen=True)
class _ParamChunk(Chunk):
    """A chunk in a buffer of its own, gathered from all ranks if there are several shards."""

    group: int = field(kw_only=True)
    start: int = field(kw_only=True)
    end: int = field(kw_only=True)
    own: torch.Tensor = field(kw_only=True)  # [end - start] the params' dtype


class _Gather(NamedTuple):
    """An all-gather in flight."""

    wait: Wait
    chunk: _ParamChunk
    gathered: torch.Tensor  # [world * (end - start)] the params' dtype


class ParamPublisher:
    """Publishes from where the parameters are.

    A rank that owns whole groups writes straight into the parameters, unless chunks are to be whole runs that
    hold the present weights. Otherwise a chunk is written to a buffer of its own and gathered from all ranks;
    the gather of one chunk is in flight while the next is computed.
    Memory: nothing, or `2 * (world + 1) * chunk_numel` elements during a step.

    Args:
        groups: layouts of the parameter groups.
        params: parameters by `slot.index`.
        comm: the ranks.
        chunk_numel: elements of one chunk.
        whole_chunks: one target a chunk, which starts at the chunk's start and holds the present weights.
    """

    reads_ahead = 0

    def __init__(
        self,
        groups: Sequence[GroupLayout],
        params: Mapping[int, torch.nn.Parameter],
        comm: Comm,
        chunk_numel: int,
        whole_chunks: bool = False,
    ) -> None:
        self._groups = groups
        self._whole_chunks = whole_chunks
        self._params = params
        self._comm = comm
        self._chunk_numel = chunk_numel
        self._in_flight: _Gather | None = None

    def chunks(self, group: int) -> Iterator[tuple[int, int]]:
        """See `Publisher`."""
        extent = self._groups[group].shard_extent
        for start in range(0, extent, self._chunk_numel):
            yield start, min(start + self._chunk_numel, extent)

    def open_chunk(self, group: int, start: int, end: int) -> Chunk:
        """See `Publisher`."""
        layout = self._groups[group]
        if layout.shards == 1 and not self._whole_chunks:
            return Chunk(
                [
                    Target(
                        start + segment.offset,
                        start + segment.offset + segment.numel,
                        segment_view(segment, self._params),
                    )
                    for segment in layout.segments(start, end)
                ]
            )
        device = self._params[layout.slots[0].index].device
        own = _chunk_buffer(end - start, params_dtype(layout, self._params), device)
        owned_end = self.owned_end(group, end)
        targets = [Target(start, owned_end, own[: owned_end - start])] if owned_end > start else []
        if self._whole_chunks:
            self.read_chunk(group, start, own)
        return _ParamChunk(targets, group=group, start=start, end=end, own=own)

    def read_chunk(self, group: int, start: int, out: torch.Tensor) -> None:
        """Copy this rank's present weights of a chunk, `[end - start]`; in the current stream's order."""
        copy_to_shard(self._groups[group], self._own_shard(group), self._params, out, start, True)

    def owned_end(self, group: int, end: int) -> int:
        """A chunk's end without the padding behind this rank's shard."""
        layout = self._groups[group]
        return min(end, layout.shard_numel(self._own_shard(group)))

    def close_chunk(self, chunk: Chunk) -> None:
        """See `Publisher`."""
        if not isinstance(chunk, _ParamChunk):
            return
        if self._groups[chunk.group].shards == 1:
            copy_from_shard(self._groups[chunk.group], 0, self._params, chunk.own, chunk.start)
            return
        own = chunk.own
        gathered = _chunk_buffer(self._comm.world * own.numel(), own.dtype, own.device)
        wait = collectives.launch_all_gather(gathered, own, self._comm)
        self._finish_in_flight()
        self._in_flight = _Gather(wait, chunk, gathered)

    def finish(self) -> None:
        """See `Publisher`."""
        self._finish_in_flight()

    def _own_shard(self, group: int) -> int:
        return self._comm.rank if self._groups[group].shards > 1 else 0

    def _finish_in_flight(self) -> None:
        """Wait for the gather in flight and copy its rows into the parameters."""
        if self._in_flight is None:
            return
        (wait, chunk, gathered), self._in_flight = self._in_flight, None
        wait()
        layout = self._groups[chunk.group]
        rows = gathered.view(self._comm.world, -1)
        for rank, row in enumerate(rows):
            copy_from_shard(layout, rank, self._params, row, chunk.start)


def _chunk_buffer(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room for a chunk, of any content, that leaves nothing behind."""
    if device.type == "cpu":
        return mapped_tensor("chunk", numel, dtype)
    return torch.empty(numel, dtype=dtype, device=device)


def segment_view(segment: Segment, params: Mapping[int, torch.nn.Parameter]) -> torch.Tensor:
    """A segment's elements, `[segment.numel]`, where the parameter lives."""
    flat = params[segment.slot.index].data.view(-1)
    return flat[segment.param_start : segment.param_start + segment.numel]


def copy_to_shard(
    layout: GroupLayout,
    shard: int,
    params: Mapping[int, torch.nn.Parameter],
    flat: torch.Tensor,
    start: int = 0,
    non_blocking: bool = False,
) -> None:
    """Copy the parameters' present values into a run of a shard.

    Args:
        layout: the parameter group.
        shard: which of its shards.
        params: parameters by `slot.index`.
        flat: `[n]` any floating dtype, overwritten.
        start: its first element, counted from the shard's.
        non_blocking: the call may return before the copy has ended.
    """
    for segment in _run_segments(layout, shard, start, flat.numel()):
        place = flat[segment.offset : segment.offset + segment.numel]
        place.copy_(segment_view(segment, params), non_blocking=non_blocking)


def copy_from_shard(
    layout: GroupLayout,
    shard: int,
    params: Mapping[int, torch.nn.Parameter],
    flat: torch.Tensor,
    start: int = 0,
) -> None:
    """Copy a run of a shard into the parameters, the other way."""
    for segment in _run_segments(layout, shard, start, flat.numel()):
        segment_view(segment, params).copy_(flat[segment.offset : segment.offset + segment.numel])


def _run_segments(layout: GroupLayout, shard: int, start: int, numel: int) -> Iterator[Segment]:
    base, shard_end = layout.shard_bounds(shard)
    return layout.segments(base + start, min(base + start + numel, shard_end))


def params_dtype(layout: GroupLayout, params: Mapping[int, torch.nn.Parameter]) -> torch.dtype:
    """The common dtype of a group's parameters, or fp32 when they differ."""
    dtypes = {params[slot.index].dtype for slot in layout.slots}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32
