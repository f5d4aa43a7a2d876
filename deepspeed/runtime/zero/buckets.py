"""Gradient buckets: from `param.grad` to each owner's reduced slice, in an order that no rank can upset."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto

import torch

from deepspeed.runtime.zero import collectives
from deepspeed.runtime.zero.collectives import Comm, Wait
from deepspeed.runtime.zero.host_buffer import HostBuffer, LedgerEntry, tensor_entry
from deepspeed.runtime.zero.layout import BucketItem, BucketPlan, ParamSlot

# Receives a bucket's owned items and their reduced mean, flat; `items[i]` starts at
# `items[i].bucket_start - items[0].bucket_start`.
GradSink = Callable[[Sequence[BucketItem], torch.Tensor], None]


class BucketPhase(Enum):
    """Where a bucket is within one round of reduction."""

    COLLECTING = auto()  # gradients arrive
    LAUNCHED = auto()  # its collective has been issued
    DONE = auto()  # the owner's slice has been handed on


class GradBucket:
    """One bucket of the plan through its round: mark_ready, launch, wait, reset.

    Goal: a gradient is copied once, into its fixed place, and its own tensor is freed, so that the unreduced
    gradients of a whole model never exist together.
    Lifetime: the flat buffer exists from the first gradient taken until the owner's slice has been handed on.
    Memory: `plan.numel` elements of the communication dtype while in flight, nothing otherwise.

    Args:
        plan: what it holds.
        pool: lends the flat buffer.
    """

    def __init__(self, plan: BucketPlan, pool: BucketPool) -> None:
        self.plan = plan
        self.phase = BucketPhase.COLLECTING
        self._pool = pool
        self._buffer: torch.Tensor | None = None  # [plan.numel or more] communication dtype, device
        self._wait: Wait | None = None
        self._arrived: set[int] = set()  # slot.index
        self._items: dict[int, list[BucketItem]] = {}
        for item in plan.items:
            self._items.setdefault(item.slot.index, []).append(item)

    @property
    def complete(self) -> bool:
        """Whether every parameter's gradient has arrived in this round."""
        return len(self._arrived) == len(self.plan.slots)

    @property
    def missing(self) -> list[ParamSlot]:
        """Parameters whose gradient has not arrived in this round."""
        return [slot for slot in self.plan.slots if slot.index not in self._arrived]

    @property
    def arrived_count(self) -> int:
        """How many parameters' gradients have arrived in this round."""
        return len(self._arrived)

    def mark_ready(self, slot: ParamSlot, grad: torch.Tensor) -> None:
        """Take a gradient over; a repeated one adds up."""
        flat_grad = grad.detach().reshape(-1)  # it may have a graph, after backward(create_graph=True)
        for item in self._items[slot.index]:
            piece = flat_grad[item.param_start : item.param_start + item.numel]
            if slot.index in self._arrived:
                self._place(item).add_(piece)
            else:
                self._place(item).copy_(piece)
        self._arrived.add(slot.index)

    def launch(self, comm: Comm) -> None:
        """Issue the reduction; parameters without a gradient contribute zeros."""
        for slot in self.missing:
            for item in self._items[slot.index]:
                self._place(item).zero_()
        flat = self._flat()
        if len(self.plan.owner_bounds) == 2:
            self._wait = collectives.launch_all_reduce_mean(flat, comm)
        else:
            self._wait = collectives.launch_reduce_mean(flat, self.plan.owner_bounds, comm)
        self.phase = BucketPhase.LAUNCHED

    def wait(self, shard: int, sink: GradSink) -> None:
        """Wait for the reduction, hand the shard's slice to the sink, and give the buffer back."""
        assert self._wait is not None
        self._wait()
        low, high = self.plan.owner_bounds[shard], self.plan.owner_bounds[shard + 1]
        if high > low:
            sink([item for item in self.plan.items if item.owner == shard], self._flat()[low:high])
        self._free_buffer()
        self.phase = BucketPhase.DONE

    def reset(self) -> None:
        """Begin the next round, with nothing in it."""
        self._free_buffer()
        self._arrived.clear()
        self.phase = BucketPhase.COLLECTING

    def _flat(self) -> torch.Tensor:
        """The bucket's elements, `[plan.numel]`."""
        if self._buffer is None:
            self._buffer = self._pool.acquire(self.plan.numel)
        return self._buffer[: self.plan.numel]

    def _place(self, item: BucketItem) -> torch.Tensor:
        """Where an item lies in the bucket, `[item.numel]`."""
        return self._flat()[item.bucket_start : item.bucket_start + item.numel]

    def _free_buffer(self) -> None:
        if self._buffer is not None:
            self._pool.release(self._buffer)
        self._buffer, self._wait = None, None


class BucketPool:
    """Flat buffers for buckets in flight.

    On the host a buffer is kept for the next bucket, since fresh pages cost more than the copy into them; on
    a device the caching allocator does that, stream by stream.

    Args:
        dtype: element type of the gradients on the wire.
        device: where gradients are.
        allocate: makes a host buffer that holds any bucket of the plan.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, allocate: Callable[[], HostBuffer]) -> None:
        self._dtype = dtype
        self._device = device
        self._allocate = allocate
        self._buffers: list[HostBuffer] = []  # all that were made
        self._free: list[torch.Tensor] = []  # each [largest bucket] dtype, host
        self._lent: list[torch.Tensor] = []  # in flight, each [its bucket] dtype, device

    def acquire(self, numel: int) -> torch.Tensor:
        """A flat buffer of at least `numel` elements with any content."""
        if self._device.type != "cpu":
            self._lent.append(torch.empty(numel, dtype=self._dtype, device=self._device))
            return self._lent[-1]
        if not self._free:
            self._buffers.append(self._allocate())
            self._free.append(self._buffers[-1].tensor)
        return self._free.pop()

    def release(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        if self._device.type == "cpu":
            self._free.append(buffer)
        else:
            self._lent = [lent for lent in self._lent if lent is not buffer]

    def buffers(self) -> Iterator[LedgerEntry]:
        """Name what is lent from a device; host buffers are in their ledger."""
        for buffer in self._lent:
            yield tensor_entry("bucket", buffer, type(self).__name__)

    def close(self) -> None:
        """Return the memory."""
        self._free.clear()
        self._lent.clear()
        for buffer in self._buffers:
            buffer.release()


class GradReducer:
    """Runs the buckets in rounds: within a round each is launched once, in plan order, on every rank.

    A bucket is launched as soon as it and all before it are complete, so reductions overlap with the rest of
    the backward pass; `flush` launches the others at the end of it. Which gradients arrive, and in which
    order, differs from rank to rank (branches, unused or reused modules, re-entrant checkpointing); the
    sequence of collectives does not. A gradient that arrives after its bucket was launched stays in
    `param.grad` and goes into the next round.

    Only the next bucket to launch has a buffer, and those in flight: a gradient that arrives before its
    bucket's turn waits in `param.grad`, where it takes its own size. A layer whose norms come last in the
    backward pass but first in the plan would else hold a buffer for each of its matrices.

    Args:
        plans: the buckets in launch order.
        params: parameters by `slot.index`.
        comm: the ranks.
        sink: takes each reduced slice.
        pool: lends flat buffers.
        overlap: whether a launched bucket may still be in flight while the next one fills.
    """

    def __init__(
        self,
        plans: Sequence[BucketPlan],
        params: Mapping[int, torch.nn.Parameter],
        comm: Comm,
        sink: GradSink,
        pool: BucketPool,
        overlap: bool,
    ) -> None:
        self.armed = False  # whether arriving gradients are taken; otherwise they accumulate in param.grad
        self.seen: set[int] = set()  # slot.index of the gradients taken since `begin_step`
        self.rounds = 0  # rounds ended since `begin_step`; the same on every rank
        self._params = params
        self._comm = comm
        self._sink = sink
        self._depth = 1 if overlap and comm.world > 1 else 0
        self._pool = pool
        self._buckets = [GradBucket(plan, pool) for plan in plans]
        self._bucket_of = {slot.index: bucket for bucket in self._buckets for slot in bucket.plan.slots}
        self._next = 0  # first bucket of the round that is not launched
        self._waiting: set[int] = set()  # slot.index of gradients that arrived before their bucket's turn
        self._in_flight: deque[GradBucket] = deque()
        self._hooks = [
            params[slot.index].register_post_accumulate_grad_hook(_Hook(weakref.ref(self), slot))
            for plan in plans
            for slot in plan.slots
        ]

    def buffers(self) -> Iterator[LedgerEntry]:
        """What the reducer holds on a device now."""
        return self._pool.buffers()

    def flush(self) -> None:
        """End the round: launch what is left, with zeros for missing gradients, and hand everything on."""
        while self._next < len(self._buckets):
            self._launch_next()
        while self._in_flight:
            self._finish_oldest()
        for bucket in self._buckets:
            bucket.reset()
        self._next = 0
        self._waiting.clear()
        self.rounds += 1

    def begin_step(self) -> None:
        """Forget what the step that has ended has seen."""
        self.seen.clear()
        self.rounds = 0

    def pending_count(self) -> int:
        """Gradients on this rank that no finished round has brought to their owner yet."""
        waiting = sum(self._params[index].grad is not None for index in self._bucket_of)
        return waiting + sum(bucket.arrived_count for bucket in self._buckets)

    def close(self) -> None:
        """Detach from the parameters and return the buffers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for bucket in self._buckets:
            bucket.reset()
        self._pool.close()

    def on_grad(self, slot: ParamSlot) -> None:
        """A gradient has been accumulated into its parameter."""
        bucket = self._bucket_of[slot.index]
        if not self.armed or bucket.phase is not BucketPhase.COLLECTING:
            return
        if bucket is not self._buckets[self._next]:
            self._waiting.add(slot.index)
            return
        self._take(bucket, slot)
        while self._next < len(self._buckets) and self._buckets[self._next].complete:
            self._launch_next()
            self._take_waiting()

    def _take_waiting(self) -> None:
        """Move to the bucket whose turn has come what arrived for it earlier."""
        if self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            for slot in bucket.plan.slots:
                if slot.index in self._waiting:
                    self._take(bucket, slot)

    def _take(self, bucket: GradBucket, slot: ParamSlot) -> None:
        """Move a parameter's gradient, if there is one, into its bucket."""
        param = self._params[slot.index]
        if param.grad is not None:
            bucket.mark_ready(slot, param.grad.to_dense() if param.grad.is_sparse else param.grad)
            param.grad = None
            self.seen.add(slot.index)

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        for slot in bucket.missing:
            self._take(bucket, slot)
        bucket.launch(self._comm)
        self._in_flight.append(bucket)
        self._next += 1
        while len(self._in_flight) > self._depth:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        bucket = self._in_flight.popleft()
        bucket.wait(0 if len(bucket.plan.owner_bounds) == 2 else self._comm.rank, self._sink)


class _Hook:
    """A parameter's hook; holds the reducer weakly, so that parameters do not keep an engine alive."""

    def __init__(self, reducer: weakref.ref[GradReducer], slot: ParamSlot) -> None:
        self._reducer = reducer
        self._slot = slot

    def __call__(self, param: torch.Tensor) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer.on_grad(self._slot)
