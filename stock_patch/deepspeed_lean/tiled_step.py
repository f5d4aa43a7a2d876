"""Unscale, Adam and the upload of the weights in one walk over the host's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from .host_threads import host_threads, threads_beside_backward, threads_beside_launches
from .ring import StagingRing, StagingSlot
from .shapes import Shape
from .stage_base import Stage12, adam_is_stocks, side_stream

TILE_NUMEL = 4 << 20  # its fresh weights are still in the cache when they are sent on
_OPEN_TILES = 2  # one is computed, one waits


class _Tile(NamedTuple):
    """A part of the master whose step is under way."""

    start: int
    end: int
    slot: StagingSlot | None
    out: torch.Tensor | None  # [end - start] the parameters' dtype, host
    wait: Callable[[], None]


class WeightUpload:
    """Where the fresh weights of a shard go, tile by tile.

    Args:
        partition: `[numel]` the parameters' dtype, where the parameters are.
        ring: through which they pass; None where the host writes them in place.
    """

    def __init__(self, partition: torch.Tensor, ring: StagingRing | None) -> None:
        self._partition = partition
        self._ring = ring
        slot_numel = ring.slot_nbytes // partition.element_size() if ring is not None else TILE_NUMEL
        self.tile_numel = min(TILE_NUMEL, slot_numel)
        self._stream = side_stream(partition.device) if ring is not None else None

    def open(self, start: int, end: int) -> tuple[StagingSlot | None, torch.Tensor]:
        """Room for the weights `[start, end)`."""
        if self._ring is None:
            return None, self._partition[start:end]
        slot = self._ring.acquire()
        return slot, slot.view(end - start, self._partition.dtype)

    def close(self, tile: _Tile) -> None:
        """The tile's weights are written; send them."""
        if tile.slot is not None and tile.out is not None:
            with torch.cuda.stream(self._stream):
                self._partition[tile.start : tile.end].copy_(tile.out, non_blocking=True)
                event = torch.cuda.Event(blocking=True)
                event.record(self._stream)
            tile.slot.launch(event)

    def finish(self) -> None:
        """After this the weights are there, in the current stream's order."""
        if self._stream is not None:
            torch.cuda.current_stream(self._partition.device).wait_stream(self._stream)


class TiledOp:
    """Stands for the CPU Adam op during one step of one parameter group, and drives it by tiles.

    Args:
        op: ours, which takes scale and output, or stock's, beside which they are passes over a tile.
        queue: threads of ours, from `AdamQueue`; None with stock's op.
        adamw_mode: AdamW, else Adam.
        grad_scale: multiplies the gradient.
        upload: takes the weights; None where stock copies them itself.
    """

    def __init__(
        self, op: Any, queue: Any, adamw_mode: bool, grad_scale: float, upload: WeightUpload | None
    ) -> None:
        self._op = op
        self._queue = queue
        self._adamw_mode = adamw_mode
        self._grad_scale = grad_scale
        self._upload = upload

    def adam_update(self, optimizer_id: int, *arguments: Any) -> int:
        """What stock's DeepSpeedCPUAdam calls.

        Args:
            optimizer_id: from create_adam.
            arguments: step, lr, beta1, beta2, eps, weight_decay, bias_correction; then master, gradient and
                both moments, `[numel]` each.
        """
        numbers, flats = arguments[:7], arguments[7:]
        pending: deque[_Tile] = deque()
        tile_numel = self._upload.tile_numel if self._upload is not None else TILE_NUMEL
        for start in range(0, flats[0].numel(), tile_numel):
            end = min(start + tile_numel, flats[0].numel())
            slot, out = self._upload.open(start, end) if self._upload is not None else (None, None)
            parts = [flat[start:end] for flat in flats]
            if self._queue is not None:
                wait = self._submit(numbers, parts, out)
            else:
                wait = partial(self._step_here, optimizer_id, numbers, parts, out)
            pending.append(_Tile(start, end, slot, out, wait))
            if len(pending) == _OPEN_TILES:
                self._close(pending.popleft())
        while pending:
            self._close(pending.popleft())
        if self._upload is not None:
            self._upload.finish()
        return 0

    def _close(self, tile: _Tile) -> None:
        tile.wait()
        if self._upload is not None:
            self._upload.close(tile)

    def _submit(
        self, numbers: tuple[Any, ...], parts: list[torch.Tensor], out: torch.Tensor | None
    ) -> Callable[[], None]:
        """Queue a tile on the op's threads."""
        *hyper, bias_correction = numbers
        ticket = self._queue.submit(*parts, out, *hyper, self._adamw_mode, bias_correction, self._grad_scale)
        return partial(self._queue.wait, ticket)

    def _step_here(
        self,
        optimizer_id: int,
        numbers: tuple[Any, ...],
        parts: list[torch.Tensor],
        out: torch.Tensor | None,
    ) -> None:
        """The same with stock's op."""
        master, gradient = parts[:2]
        if self._grad_scale != 1.0:
            gradient.mul_(self._grad_scale)
        self._op.adam_update(optimizer_id, *numbers, *parts)
        if out is not None:
            out.copy_(master)


class TiledStep(Stage12):
    """Runs stock's optimizer step over an op that works by tiles. The optimizer's own step, hooks and
    counters stay stock's."""

    SHAPES: ClassVar[dict[str, Shape]] = {
        "_optimizer_step": Shape(
            ("self", "group_no"), ("param_groups", "step", "_lazy_init_hp_params_optimizer_state")
        ),
    }
    _grad_scale = 1.0
    _queue: Any = None

    @property
    def steps_by_tiles(self) -> bool:
        """Whether the optimizer is one that can be driven by tiles."""
        return self.on_host and adam_is_stocks(self.optimizer) and not self.torch_autocast_gradscaler

    def _step_threads(self) -> int:
        """Threads of the op, less those that are needed for copies meanwhile."""
        if not self.has_device:
            return host_threads()
        return threads_beside_launches() if self.lean.pin else threads_beside_backward()

    def _upload(self, group_no: int) -> WeightUpload | None:
        """Takes the weights of a group; None where stock does that."""
        return None

    def _optimizer_step(self, group_no: int) -> None:
        if not self.steps_by_tiles:
            super()._optimizer_step(group_no)
            return
        optimizer = self.optimizer
        op, grad_scale = optimizer.ds_opt_adam, self._grad_scale
        if self._queue is None and hasattr(op, "AdamQueue"):
            self._queue = op.AdamQueue(self._step_threads())
        optimizer.ds_opt_adam = TiledOp(
            op, self._queue, optimizer.adam_w_mode, grad_scale, self._upload(group_no)
        )
        try:
            super()._optimizer_step(group_no)
        finally:
            optimizer.ds_opt_adam = op
            self._grad_scale = 1.0

    def destroy(self) -> None:
        """As stock's, without the threads."""
        self._queue = None
        super().destroy()


class DeferredUnscale(TiledStep):
    """Unscale and clip become one factor of the Adam pass instead of a pass of their own. The gradient keeps
    its scale."""

    SHAPES: ClassVar[dict[str, Shape]] = {
        **TiledStep.SHAPES,
        "unscale_and_clip_grads": Shape(("self", "grad_groups_flat", "total_norm"), ("data", "mul_")),
        "step": Shape(("self", "closure"), ("unscale_and_clip_grads", "_optimizer_step")),
    }

    def unscale_and_clip_grads(self, grad_groups_flat: Any, total_norm: Any) -> None:
        """Notes the factor for the step of the group; anything but a group's own gradient is scaled now."""
        own = [master.grad for master in self.single_partition_of_fp32_groups]
        if not self.steps_by_tiles or not any(grad_groups_flat[0] is grad for grad in own):
            super().unscale_and_clip_grads(grad_groups_flat, total_norm)
            return
        one = torch.ones(1)  # stock's own arithmetic makes the factor of it
        super().unscale_and_clip_grads([one], total_norm)
        self._grad_scale = float(one)


class _Published(torch.Tensor):
    """Stands where stock keeps its 16-bit copy of the weights: copies into it and from it do nothing, since
    the weights are where they belong already."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Drops copies; all else is an empty tensor's."""
        if func is torch.Tensor.copy_:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


class TiledUpload(TiledStep):
    """Weights leave tile by tile, through a ring of fixed size or, on a CPU, straight to their place. Memory:
    a ring of three slots instead of 2 bytes an element."""

    SHAPES: ClassVar[dict[str, Shape]] = {
        **TiledStep.SHAPES,
        "initialize_optimizer_states": Shape(("self",)),
        "step": Shape(
            ("self", "closure"),
            ("param_buffer_of_bit16_for_cpu_offload_groups", "parallel_partitioned_bit16_groups", "copy_"),
        ),
    }
    uploads_through_ring = True

    def initialize_optimizer_states(self) -> None:
        """Lets go of stock's copy before the other states are made."""
        if self.steps_by_tiles:
            copies = self.param_buffer_of_bit16_for_cpu_offload_groups
            copies[:] = [torch.empty(0).as_subclass(_Published) for _ in copies]
        super().initialize_optimizer_states()

    def _upload(self, group_no: int) -> WeightUpload:
        rank = torch.distributed.get_rank(group=self.real_dp_process_group[group_no])
        partition = self.parallel_partitioned_bit16_groups[group_no][rank]
        return WeightUpload(partition, self.lean.ring() if self.has_device else None)
