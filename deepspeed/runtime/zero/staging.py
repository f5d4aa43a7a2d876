"""Publishing weights through the staging ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from deepspeed.runtime.zero.collectives import Wait
from deepspeed.runtime.zero.publisher import OPEN_CHUNKS, Chunk, ParamPublisher, Target
from deepspeed.runtime.zero.ring import StagingRing, StagingSlot

SLOTS = OPEN_CHUNKS + 1  # of the ring, unless weights are read ahead


@dataclass(frozen=True)
class _StagedChunk(Chunk):
    """A chunk that is written in host memory first."""

    group: int = field(kw_only=True)
    start: int = field(kw_only=True)
    end: int = field(kw_only=True)
    slot: StagingSlot = field(kw_only=True)
    staged: torch.Tensor = field(kw_only=True)  # [end - start] the params' dtype, host


class UploadPublisher:
    """Publishes weights that are computed on the host to parameters on a device.

    The host writes a chunk into a slot; its upload and, with several ranks, its all-gather run on a side
    stream while the host computes the next chunk. If the host needs the present weights, the chunk after that
    comes down meanwhile, on a third stream.

    Args:
        inner: publishes from the device.
        dtypes: the parameters' dtype, one a group.
        ring: the staging ring; a slot holds a chunk.
        device: where the parameters are.
        reads_weights: chunks hold the present weights when they are written.
    """

    def __init__(
        self,
        inner: ParamPublisher,
        dtypes: Sequence[torch.dtype],
        ring: StagingRing,
        device: torch.device,
        reads_weights: bool = False,
    ) -> None:
        self.reads_ahead = int(reads_weights)
        self._read_stream = torch.cuda.Stream(device) if reads_weights else None
        self._inner = inner
        self._dtypes = dtypes
        self._ring = ring
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._started = False  # between the first chunk and `finish`

    def chunks(self, group: int) -> Iterator[tuple[int, int]]:
        """See `Publisher`."""
        return self._inner.chunks(group)

    def open_chunk(self, group: int, start: int, end: int) -> Chunk:
        """See `Publisher`."""
        if not self._started:
            # The device may still be reading the weights of the pass before, or changing them.
            for stream in filter(None, (self._stream, self._read_stream)):
                stream.wait_stream(torch.cuda.current_stream(self._device))
            self._started = True
        slot = self._ring.acquire()
        staged = slot.view(end - start, self._dtypes[group])
        owned_end = self._inner.owned_end(group, end)
        targets = [Target(start, owned_end, staged[: owned_end - start])] if owned_end > start else []
        filled = self._read(group, start, staged) if self._read_stream is not None else None
        return _StagedChunk(targets, filled, group=group, start=start, end=end, slot=slot, staged=staged)

    def _read(self, group: int, start: int, staged: torch.Tensor) -> Wait:
        """Start bringing the present weights of a chunk down; returns what waits for them."""
        with torch.cuda.stream(self._read_stream):
            self._inner.read_chunk(group, start, staged)
            event = torch.cuda.Event(blocking=True)
            event.record(self._read_stream)
        return event.synchronize

    def close_chunk(self, chunk: Chunk) -> None:
        """See `Publisher`."""
        assert isinstance(chunk, _StagedChunk)
        with torch.cuda.stream(self._stream):
            inner = self._inner.open_chunk(chunk.group, chunk.start, chunk.end)
            for target in inner.targets:
                source = chunk.staged[target.start - chunk.start : target.end - chunk.start]
                target.out.copy_(source, non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
            chunk.slot.launch(event)
            self._inner.close_chunk(inner)

    def finish(self) -> None:
        """See `Publisher`."""
        with torch.cuda.stream(self._stream):
            self._inner.finish()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._started = False
