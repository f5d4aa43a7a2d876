"""`loss.backward()` without the engine: the same scale as through it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed.runtime.precision import LossScalerBase
from deepspeed.utils.nested import map_tensors


class PlainBackward:
    """Scales gradients where they enter the module, unless the loss was scaled before.

    Goal: a training loop that calls `loss.backward()` trains as one that calls `engine.backward(loss)`.
    Pattern: what leaves the engine are views of the module's outputs, each with a hook that multiplies what
    comes back. The module's own graph does not pass through the views, so a loss that it computes from
    another of its outputs, such as logits, is scaled once.

    Args:
        loss_scaler: what the loss is multiplied by.
        accumulation: micro-batches of a step.

    Source: DeepSpeed 0.19.8 divides a plain backward by the accumulation steps; here the loss scale applies
    too.
    """

    def __init__(self, loss_scaler: LossScalerBase, accumulation: int) -> None:
        self._loss_scaler = loss_scaler
        self._accumulation = accumulation
        self._scaled_before = False  # the pass under way starts from a loss that is scaled already
        self.scaled = False  # a pass since the last `end_micro_step` was scaled, by a hook or before

    def watch(self, output: Any) -> Any:
        """The module's output with views in place of its floating tensors that carry gradients.

        Args:
            output: tensors, nested in lists, tuples and dicts at will.
        """
        return map_tensors(output, self._watched)

    def scaled_before(self, loss: torch.Tensor) -> torch.Tensor:
        """A scaled loss whose backward pass the hooks leave alone."""
        if loss.requires_grad:
            loss.register_hook(self._begin_scaled_pass)
        return loss

    @contextmanager
    def inactive(self) -> Iterator[None]:
        """Around a pass that starts from a scaled loss."""
        self._scaled_before = True
        try:
            yield
        finally:
            self._scaled_before = False

    def end_micro_step(self) -> None:
        """Forget the passes so far."""
        self.scaled = self._scaled_before = False

    def _watched(self, tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.requires_grad and tensor.is_floating_point()):
            return tensor
        view = tensor.view_as(tensor)
        view.register_hook(self._scale)
        return view

    def _scale(self, grad: torch.Tensor) -> torch.Tensor | None:
        self.scaled = True
        return None if self._scaled_before else grad * (self._loss_scaler.loss_scale / self._accumulation)

    def _begin_scaled_pass(self, grad: torch.Tensor) -> None:
        self.scaled = self._scaled_before = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_scaled_pass)

    def _end_scaled_pass(self) -> None:
        self._scaled_before = False
