"""The staging ring: fixed host memory through which everything between device and host passes."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from .host_buffer import HostBuffer, Ledger

# Takes the place of a run's first element in what was submitted, and the run itself in host memory.
HostSink = Callable[[int, torch.Tensor], None]


class StagingSlot:
    """One slot of the ring: host bytes and the transfer that may still be using them."""

    def __init__(self, buffer: HostBuffer) -> None:
        self._buffer = buffer
        self._event: torch.cuda.Event | None = None

    def view(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The slot's first `numel` elements as `dtype`, host."""
        return self._buffer.tensor[: numel * dtype.itemsize].view(dtype)

    def launch(self, event: torch.cuda.Event) -> None:
        """A transfer that uses the slot ends at this event."""
        self._event = event

    def wait(self) -> None:
        """Wait until the slot's last transfer has ended."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None


class StagingRing:
    """A few slots of fixed extent, used in turn.

    Goal: page-locked memory is a constant, whatever the model; only this is ever pinned.
    Lifetime: from initialization to `close`. Downloads use it during backward, uploads during step, never
    both.
    Memory: `slots * slot_nbytes`.

    Args:
        slot_nbytes: bytes of one slot.
        pin: page-lock the slots.
        ledger: counts them.
        slots: how many.
    """

    def __init__(self, slot_nbytes: int, pin: bool, ledger: Ledger, slots: int) -> None:
        self.slot_nbytes = slot_nbytes
        self.slots = slots
        self._buffers = [
            HostBuffer(
                f"staging[{index}]", slot_nbytes, torch.uint8, ledger, owner=type(self).__name__
            ).fill_zero()
            for index in range(slots)
        ]
        # Stops at the first that fails: one warning, not one a slot.
        self.pinned = pin and all(buffer.pin() for buffer in self._buffers)
        self._slots = deque(StagingSlot(buffer) for buffer in self._buffers)

    def acquire(self) -> StagingSlot:
        """The slot whose last use is longest ago, free to be overwritten."""
        self._slots.rotate(-1)
        slot = self._slots[-1]
        slot.wait()
        return slot

    def close(self) -> None:
        """Wait for what is in flight and return the memory."""
        for slot in self._slots:
            slot.wait()
        for buffer in self._buffers:
            buffer.release()


class _Download(NamedTuple):
    """A reduced slice on its way to the host."""

    flat: torch.Tensor  # [n] device
    ready: torch.cuda.Event  # the slice is complete
    sink: HostSink


class _Arrival(NamedTuple):
    """A part of a download that is being copied into a slot."""

    download: _Download
    first: int
    view: torch.Tensor  # [n] host
    slot: StagingSlot

    @property
    def is_last(self) -> bool:
        """Whether it is the end of its download."""
        return self.first + self.view.numel() == self.download.flat.numel()


class Downloader:
    """Brings reduced slices to host memory while the device goes on with the backward pass.

    A worker thread copies slices through the ring on a stream of its own and hands each slot to the sink,
    which stores or adds it with the host kernels; both release the GIL. While one slot is handed on, the
    others fill, across slices. The device waits for nobody; the thread that runs backward waits only when
    `LOOKAHEAD` slices wait for the worker.

    Args:
        ring: the staging ring.
        device: where the slices are.
    """

    LOOKAHEAD = 2

    def __init__(self, ring: StagingRing, device: torch.device) -> None:
        self._ring = ring
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._queue: queue.Queue[_Download | None] = queue.Queue(self.LOOKAHEAD)
        self._arrivals: deque[_Arrival] = deque()
        self._error: BaseException | None = None
        self._worker = threading.Thread(target=self._run, name="gradient-download", daemon=True)
        self._worker.start()

    def submit(self, flat: torch.Tensor, sink: HostSink) -> None:
        """Start bringing a slice down; it is complete in the current stream's order.

        Args:
            flat: `[n]` device, n at least 1; may be freed by the caller at once.
            sink: called on the worker for each run that has arrived.
        """
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(flat.device))
        flat.record_stream(self._stream)
        self._queue.put(_Download(flat, ready, sink))

    def wait(self) -> None:
        """Wait until everything submitted has been handed to its sink."""
        self._queue.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """End the worker. May be called twice, and from the worker itself."""
        if self._worker.is_alive():
            self._queue.put(None)
            if self._worker is not threading.current_thread():
                self._worker.join()

    def _run(self) -> None:
        # A thread starts on the first device, and would open a context there.
        torch.cuda.set_device(self._device)
        while True:
            try:
                download = self._queue.get(block=not self._arrivals)
            except queue.Empty:
                self._deliver_oldest()
                continue
            if download is None:
                return
            try:
                self._launch_copies(download)
            except BaseException as error:
                self._error = error
                self._queue.task_done()
            # A slice belongs to its arrivals now: while this thread sleeps it must keep nothing alive.
            del download

    def _launch_copies(self, download: _Download) -> None:
        """Send a slice into the ring, handing the oldest slot on whenever the ring is full."""
        self._stream.wait_event(download.ready)
        slot_numel = self._ring.slot_nbytes // download.flat.element_size()
        for first in range(0, download.flat.numel(), slot_numel):
            if len(self._arrivals) == self._ring.slots:
                self._deliver_oldest()
            part = download.flat[first : first + slot_numel]
            slot = self._ring.acquire()
            view = slot.view(part.numel(), part.dtype)
            with torch.cuda.stream(self._stream):
                view.copy_(part, non_blocking=True)
                event = torch.cuda.Event(blocking=True)
                event.record(self._stream)
            slot.launch(event)
            self._arrivals.append(_Arrival(download, first, view, slot))

    def _deliver_oldest(self) -> None:
        """Hand the oldest slot to its sink; an error is kept for `wait`, and the rest passes unused."""
        arrival = self._arrivals.popleft()
        try:
            if self._error is None:
                self._deliver(arrival)
        except BaseException as error:
            self._error = error
        finally:
            if arrival.is_last:
                self._queue.task_done()

    def _deliver(self, arrival: _Arrival) -> None:
        arrival.slot.wait()
        arrival.download.sink(arrival.first, arrival.view)
