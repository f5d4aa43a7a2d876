"""The fp32 master shard on the host: what this project exists for."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.change_gate import ChangeGate
from deepspeed.runtime.zero.collectives import Wait
from deepspeed.runtime.zero.forms import Flat, StateForms
from deepspeed.runtime.zero.host_buffer import HostBuffer, Ledger, LedgerEntry
from deepspeed.runtime.zero.host_shard import HostShard
from deepspeed.runtime.zero.inner_state import state_entries
from deepspeed.runtime.zero.layout import BucketItem, GroupLayout
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.publisher import Publisher, Target, publish_all
from deepspeed.runtime.zero.ring import Downloader

logger = logging.getLogger("DeepSpeed")


@dataclass(frozen=True)
class HostSettings:
    """How a host master keeps its state.

    Args:
        grad_dtype: element type in which gradients are kept at first: fp32, or a 16-bit type.
        widens_grads: a second contribution in one step widens gradients to fp32; else they are added in the
            type that they have.
        grad_threads: threads that store and add gradients, beside the backward pass.
        step_threads: threads of the Adam kernel.
        ledger: counts every buffer.
    """

    grad_dtype: torch.dtype
    grad_threads: int
    step_threads: int
    ledger: Ledger
    widens_grads: bool = True
    forms: StateForms = StateForms()


class _HostGroup(NamedTuple):
    """One parameter group's shard."""

    state: HostShard
    grads: HostBuffer  # [shard_numel] fp32 or 16 bit


class _Piece(NamedTuple):
    """A run of gradients that has arrived in this step."""

    numel: int
    sum_of_squares: float  # of the run as it is now; not finite if any element is not


class HostMaster:
    """Master weights, gradients and optimizer state of this rank's shard, in host memory.

    Goal: 16 bytes a parameter, or 14 when a 16-bit gradient arrives once a step, and not one more: at
    initialization, at the first step, at a save, and beside forked children.
    Pattern: `load_grads` stores the first contribution of a step and adds the later ones in fp32, in the one
    gradient buffer there is; the kernel that does it also returns the sum of squares of the result, which
    therefore is known without another pass when the last contribution is in. `step` walks each tile once: the
    Adam kernel reads the gradient times one factor (unscale and clip) and writes master, moments and the
    low-precision weight. The gradient itself is never rewritten. Another optimizer runs in its ordinary way
    on the flat shard instead.
    Lifetime: from initialization to `close`. A 16-bit gradient buffer is widened in place, once and for good,
    when a second contribution comes; address space for it is reserved from the beginning.
    Memory, bytes a parameter of the shard: 4 master + 4 or 2 gradient + 8 Adam moments; less in smaller
    forms, see `HostShard`.

    Args:
        groups: layouts of the parameter groups.
        shard: which shard is this rank's.
        params: parameters by `slot.index`; the master starts from their values.
        optimizer: the inner optimizer; its groups' `params` become the flat masters.
        settings: how to keep the state.
        op: the compiled host kernels.
        downloader: brings gradient slices from the device; None when they are in host memory already.
    """

    def __init__(
        self,
        groups: Sequence[GroupLayout],
        shard: int,
        params: Mapping[int, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        settings: HostSettings,
        op: ModuleType,
        downloader: Downloader | None,
    ) -> None:
        self._optimizer = optimizer
        self._settings = settings
        self._op = op
        self._downloader = downloader
        # By (group, shard_start): what this step has brought.
        self._pieces: dict[tuple[int, int], _Piece] = {}
        self._gate: ChangeGate | None = None  # of a checkpoint that is being written meanwhile
        self._fused = isinstance(optimizer, DeepSpeedCPUAdam)
        self._queue: Any = None  # computes tiles while others travel
        self._groups = [self._make_group(index, layout, shard, params) for index, layout in enumerate(groups)]
        for group, options in zip(self._groups, optimizer.param_groups, strict=True):
            options["params"] = [group.state.param]
        if isinstance(optimizer, DeepSpeedCPUAdam):
            optimizer.num_threads = settings.step_threads
            if downloader is not None:
                self._queue = optimizer.make_queue(settings.step_threads)
            for group in self._groups:
                group.state.init_moments(optimizer)

    @property
    def masters(self) -> list[Flat]:
        """The flat fp32 masters, one a group, `[shard_numel]`."""
        return [group.state.master for group in self._groups]

    def grads(self, group: int) -> torch.Tensor:
        """A group's gradient as kept, `[shard_numel]`: the mean over ranks, times the loss scale."""
        self.wait_grads()
        return self._groups[group].grads.tensor

    def load_grads(self, items: Sequence[BucketItem], flat: torch.Tensor) -> None:
        """Take a reduced slice: store it, or add it to what this step has brought already.

        Args:
            items: what the slice holds, in order.
            flat: `[sum of numels]`, any floating dtype, on the device or the host.
        """
        if self._downloader is None:
            self._store(items, 0, flat)
        else:
            self._downloader.submit(flat, partial(self._store, items))

    def wait_grads(self) -> None:
        """Wait until every gradient taken has arrived in host memory."""
        if self._downloader is not None:
            self._downloader.wait()

    def sum_of_squares(self) -> float:
        """Sum of squares of the shard's gradients; not finite if any element is not."""
        self.wait_grads()
        return math.fsum(piece.sum_of_squares for piece in self._pieces.values())

    def set_grads(self, group: int, start: int, value: torch.Tensor) -> None:
        """Overwrite a run of gradients, `[n]`, and let the norm follow.

        A value that the buffer's dtype cannot hold is rounded to it.
        """
        self.wait_grads()
        end = start + value.numel()
        grads = self._groups[group].grads.tensor
        grads[start:end].copy_(value)
        for (owner, first), piece in self._pieces.items():
            if owner == group and first < end and start < first + piece.numel:
                run = grads[first : first + piece.numel]
                total = self._op.sum_of_squares(run, self._settings.grad_threads)
                self._pieces[owner, first] = _Piece(piece.numel, total)

    def scale_grads(self, factor: float) -> None:
        """Multiply the gradients in place, for optimizers that take no factor."""
        self.wait_grads()
        for group in self._groups:
            group.grads.tensor.mul_(factor)

    def step(self, factor: float, publisher: Publisher) -> None:
        """Update masters and state from the gradients times `factor`; publish the weights tile by tile."""
        self.wait_grads()
        if self._fused:
            for group in self._groups:
                self._optimizer.state[group.state.param]["step"] += 1
            # What torch's schedules look at before they warn that the optimizer was not stepped first.
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
            publish_all(publisher, len(self._groups), partial(self._step_target, factor))
        else:
            self._step_unfused(factor)
            self.publish(publisher)
        self.clear_grads()

    def publish(self, publisher: Publisher) -> None:
        """Bring the masters' present values to the parameters, without a step."""
        publish_all(publisher, len(self._groups), self._copy_target)

    def refresh(self) -> None:
        """Set the masters from the parameters' present values."""
        for group in self._groups:
            group.state.refresh()

    def clear_grads(self) -> None:
        """Forget the gradients: the next contribution is the first of its step."""
        self.wait_grads()
        self._pieces.clear()

    def move_to_host(self, kinds: Collection[OffloadStateTypeEnum]) -> bool:
        """Nothing to move: all of it is on the host, and works from there."""
        return False

    def move_back(self) -> None:
        """Nothing was moved."""

    def guard(self, gate: ChangeGate) -> bool:
        """Change nothing that a gate holds back; returns that it will be heeded."""
        self._gate = gate
        return True

    def wait_readers(self) -> None:
        """Wait until masters and state may change as a whole."""
        if self._gate is not None:
            self._gate.wait_all()
            self._gate = None

    def buffers(self) -> Iterator[LedgerEntry]:
        """What the ledger does not count: state that another optimizer than our Adam made by itself."""
        if not self._fused:
            yield from state_entries(self._optimizer)

    def close(self) -> None:
        """Return the memory to the system."""
        self.wait_readers()
        if self._downloader is not None:
            self._downloader.close()
        self._queue = None  # ends its threads; what they were given is computed first
        for group in self._groups:
            self._optimizer.state.pop(group.state.param, None)
            group.state.release()
            group.grads.release()

    def _make_group(
        self, index: int, layout: GroupLayout, shard: int, params: Mapping[int, torch.nn.Parameter]
    ) -> _HostGroup:
        """Allocate a group's buffers and copy its master from the parameters."""
        ledger, grad_dtype = self._settings.ledger, self._settings.grad_dtype
        state = HostShard(index, layout, shard, params, self._settings.forms, ledger, self._op)
        grads = HostBuffer(
            f"gradient[{index}]", state.numel, grad_dtype, ledger, torch.float32, type(self).__name__
        )
        return _HostGroup(state, grads.fill_zero())

    def _store(self, items: Sequence[BucketItem], first: int, flat: torch.Tensor) -> None:
        """Store or add a run of gradients that lies in host memory.

        Args:
            items: what it may hold; only the part of each that falls into the run is taken.
            first: the run's first element, counted from the first item's.
            flat: `[n]`, host.
        """
        base = items[0].bucket_start + first
        for item in items:
            low = max(item.bucket_start - base, 0)
            high = min(item.bucket_start + item.numel - base, flat.numel())
            if low < high:
                start = item.shard_start + base + low - item.bucket_start
                self._contribute(item.slot.group, start, flat[low:high])

    def _contribute(self, index: int, start: int, piece: torch.Tensor) -> None:
        group = self._groups[index]
        add = (index, start) in self._pieces
        if add and self._settings.widens_grads and group.grads.dtype != torch.float32:
            logger.info(
                "gradient[%d]: a second contribution in one step; the buffer is widened from %s to fp32, "
                "+%d bytes of host memory from now on",
                index,
                group.grads.dtype,
                2 * group.grads.numel,
            )
            group.grads.retype(torch.float32)
        place = group.grads.tensor[start : start + piece.numel()]
        total = self._op.accumulate(place, piece, add, self._settings.grad_threads)
        self._pieces[index, start] = _Piece(piece.numel(), total)

    def _copy_target(self, index: int, target: Target) -> None:
        """Round a run of the master to the weight's dtype."""
        self._groups[index].state.write_weights(target)

    def _step_target(self, factor: float, index: int, target: Target) -> Wait | None:
        """One fused pass over a run of the shard."""
        assert isinstance(self._optimizer, DeepSpeedCPUAdam)
        if self._gate is not None:
            self._gate.wait(index, target.end)
        group = self._groups[index]
        part = group.state.slice(self._optimizer, target, group.grads.tensor[target.start : target.end])
        step = self._optimizer.state[group.state.param]["step"]
        arguments = (self._optimizer.param_groups[index], step, part, factor)
        if self._queue is not None:
            return self._optimizer.submit_slice(self._queue, *arguments)
        self._optimizer.step_slice(*arguments)
        return None

    def _step_unfused(self, factor: float) -> None:
        """Any elementwise torch optimizer, in its ordinary way on the flat shards."""
        self.wait_readers()
        if factor != 1.0:
            self.scale_grads(factor)
        for group in self._groups:
            group.state.param.grad = group.grads.tensor
        self._optimizer.step()
        for group in self._groups:
            group.state.param.grad = None
