"""Elementwise optimizers in plain torch, a tile at a time: what Adagrad and Lion on the host share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

# Temporaries are this many fp32 elements (4 MiB), however large the parameter.
_TILE_NUMEL = 1 << 20


class TiledOptimizer(torch.optim.Optimizer, ABC):
    """Walks each parameter in tiles and updates them in fp32; the formula is the subclass's `update_tile`.

    State is `step` (an int of each parameter) and one moment, fp32 or of the parameter's type. Temporaries
    are bounded by a tile: the host pays nothing beyond the state.
    """

    moment_name: str
    fp32_optimizer_states: bool

    @abstractmethod
    def update_tile(
        self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, moment: torch.Tensor
    ) -> None:
        """Updates a tile in place.

        Args:
            group: settings.
            param: [tile_numel] fp32.
            grad: [tile_numel] fp32, may be overwritten.
            moment: [tile_numel] fp32.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: recomputes the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: a parameter or gradient that is not a contiguous tensor on the host.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(group, param, param.grad)
        return loss

    def _update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        for name, tensor in (("params", param), ("grads", grad)):
            if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_contiguous():
                raise ValueError(
                    f"{name}: expected contiguous CPU tensors, got {tuple(tensor.shape)} on {tensor.device}. "
                    "Call .contiguous(), and keep the optimizer's tensors on the host."
                )
        state = self.state[param]
        if not state:
            moment_dtype = torch.float32 if self.fp32_optimizer_states else param.dtype
            state["step"] = 0
            state[self.moment_name] = torch.zeros(param.shape, dtype=moment_dtype)
        state["step"] = int(state["step"]) + 1
        flats = [tensor.detach().view(-1) for tensor in (param, grad, state[self.moment_name])]
        for start in range(0, param.numel(), _TILE_NUMEL):
            tiles = [flat[start : start + _TILE_NUMEL] for flat in flats]
            param_tile, moment_tile = tiles[0].float(), tiles[2].float()
            self.update_tile(group, param_tile, tiles[1].to(torch.float32, copy=True), moment_tile)
            for stored, computed in ((tiles[0], param_tile), (tiles[2], moment_tile)):
                if stored.dtype != torch.float32:  # a fp32 tile was updated where it lies
                    stored.copy_(computed)
