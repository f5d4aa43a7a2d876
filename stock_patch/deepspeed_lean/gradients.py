"""Gradients on their way to the host: 16 bits wide, added in fp32 where the optimizer reads them."""

from __future__ import annotations

import math
import weakref
from functools import partial
from typing import Any, ClassVar

import torch

from .host_threads import host_threads, threads_beside_backward
from .ring import Downloader
from .shapes import Shape
from .stage_base import Stage12


class Fp32Accumulation(Stage12):
    """The fp32 gradient is the accumulator.

    Stock keeps, once there are several micro-batches, another copy of every gradient on the host, in 16 bits,
    brings it back to the device each time to add to it, and copies the sum to the fp32 gradient at the end.
    Here each micro-batch's slice comes down in its own type, by a thread, through the ring, and is stored or
    added in fp32; the sum of squares falls out of the same pass. A parameter without a gradient in a window
    has zeros in its slice, where stock leaves what was there.

    Memory: the ring, instead of 2 bytes an element of every parameter that this rank owns a part of.
    """

    SHAPES: ClassVar[dict[str, Shape]] = {
        "copy_grads_in_partition": Shape(
            ("self", "param", "group_idx"),
            ("async_accumulate_grad_in_cpu_via_gpu", "async_inplace_copy_grad_to_fp32_buffer_from_gpu"),
        ),
        "_finalize_cpu_offload_gradient_accumulation": Shape(
            ("self",), ("async_inplace_copy_grad_to_fp32_buffer_from_gpu",)
        ),
        "_use_compact_grad_partition_buffer": Shape(("self", "group_idx")),
        "get_param_gradient_attribute": Shape(("self", "param")),
        "clear_grad_attribute": Shape(("self", "param")),
        "get_grad_position": Shape(None, ("grad_position",)),
        "setup_buckets": Shape(None, ("micro_step_id",)),
        "_is_muon_group": Shape(("self", "tensor_list")),
        "independent_gradient_partition_epilogue": Shape(("self",), ("reduce_ipg_grads",)),
        "complete_grad_norm_calculation_for_cpu_offload": Shape(
            ("self", "params"), ("norm_for_param_grads", "item")
        ),
        "step": Shape(("self", "closure"), ("_wait_for_offload_copies", "check_overflow")),
        "_check_overflow": Shape(None, ("has_overflow",)),
        "has_overflow": Shape(None, ("local_overflow",)),
    }
    downloads_through_ring = True
    _downloader: Downloader | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Sum of squares of each parameter's slice, as its last part left it.
        self._squares: dict[int, float] = {}
        self._in_window: set[int] = set()  # parameters that have a gradient since the last step
        self._to_add_to: set[int] = set()  # those of them to which the next micro-batch is added
        self._nonzero: set[int] = set()  # parameters whose slices hold one, of this window or before
        super().__init__(*args, **kwargs)
        self._adds_in_fp32 = self._may_add_in_fp32()
        if self._adds_in_fp32:
            self.temp_grad_buffer_for_gpu_offload = None  # only stock's way of adding uses it

    def _may_add_in_fp32(self) -> bool:
        """Whether gradients take this way: not if stock adds them on the device in fp32, nor for Muon."""
        groups = range(len(self.params_in_partition))
        return (
            self.on_host
            and self.lean.op is not None
            and not self.low_precision_master_weights_and_grads
            and not any(self._use_compact_grad_partition_buffer(group) for group in groups)
            and not any(self._is_muon_group(params) for params in self.params_in_partition if params)
        )

    def copy_grads_in_partition(self, param: torch.nn.Parameter, group_idx: int | None = None) -> None:
        """Sends a parameter's reduced gradient, as far as this rank owns it, to the fp32 gradient."""
        if not self._adds_in_fp32:
            super().copy_grads_in_partition(param, group_idx)
            return
        param_id = self.get_param_id(param)
        group, source, start, numel = self.grad_position[param_id]
        target = self.single_partition_of_fp32_groups[group].grad.view(-1)[start : start + numel]
        part = self.get_param_gradient_attribute(param).detach().view(-1)[source : source + numel]
        # Stock's rule. The only backward of a window is kept for no other: a second one, of a job that leaves
        # out a step, takes its place.
        accumulates = self.micro_step_id > 0 or not self.is_gradient_accumulation_boundary()
        sink = partial(self._store, param_id, target, accumulates and param_id in self._to_add_to)
        if accumulates:
            self._to_add_to.add(param_id)
        self._in_window.add(param_id)
        if self.has_device:
            # A copy of its own: the bucket that it lies in is used again before it has left.
            self._download().submit(part.clone(), sink)
        else:
            sink(0, part)
        self.clear_grad_attribute(param)

    def _store(self, param_id: int, target: torch.Tensor, add: bool, first: int, part: torch.Tensor) -> None:
        """Store or add a run of a slice, and keep the slice's sum of squares."""
        threads = threads_beside_backward() if self.has_device else host_threads()
        squares = self.lean.op.accumulate(target[first : first + part.numel()], part, add, threads)
        self._squares[param_id] = squares + (self._squares[param_id] if first else 0.0)

    def _download(self) -> Downloader:
        if self._downloader is None:
            self._downloader = Downloader(self.lean.ring(), self.bit16_groups_flat[0].device)
            weakref.finalize(self, self._downloader.close)
        return self._downloader

    def independent_gradient_partition_epilogue(self) -> None:
        """As stock's; at the end of a window gradients, norms and overflow are there for whoever looks."""
        super().independent_gradient_partition_epilogue()
        if self._adds_in_fp32 and self.is_gradient_accumulation_boundary():
            self._take_norms()

    def _finalize_cpu_offload_gradient_accumulation(self) -> None:
        """Nothing is left to do: sums lie in the fp32 gradient already."""
        if self._adds_in_fp32:
            self._take_norms()
            return
        super()._finalize_cpu_offload_gradient_accumulation()

    def step(self, closure: Any = None) -> Any:
        """As stock's, with norm and overflow from the sums of squares."""
        if self._adds_in_fp32:
            self._close_window()
        try:
            return super().step(closure)
        finally:
            self._in_window, self._to_add_to = set(), set()

    def _close_window(self) -> None:
        """Complete the window, and clear what it did not write."""
        self._take_norms()
        for param_id in self._nonzero - self._in_window:
            group, _, start, numel = self.grad_position[param_id]
            self.single_partition_of_fp32_groups[group].grad.view(-1)[start : start + numel].zero_()
        self._nonzero = set(self._in_window)

    def _take_norms(self) -> None:
        """Wait for what is under way, and hand stock the norms and the overflow of the window so far."""
        if self._downloader is not None:
            self._downloader.wait()
        for param_id in self._in_window:
            squares = self._squares[param_id]
            self.norm_for_param_grads[param_id] = torch.tensor(math.sqrt(squares), dtype=torch.float64)
            if not math.isfinite(squares):
                self.local_overflow = True

    def destroy(self) -> None:
        """As stock's, after ending the thread that brings gradients down."""
        if self._downloader is not None:
            self._downloader.close()
        super().destroy()


class NoTemporary(Stage12):
    """Without the host buffer of the largest parameter's size that stock makes and never reads."""

    SHAPES: ClassVar[dict[str, Shape]] = {
        "__init__": Shape(None, ("temp_grad_buffer_for_cpu_offload",)),
        "initialize_optimizer_states": Shape(("self",)),
    }

    def initialize_optimizer_states(self) -> None:
        """Lets go of it before the states are made."""
        if self.on_host:
            del self.temp_grad_buffer_for_cpu_offload
        super().initialize_optimizer_states()
