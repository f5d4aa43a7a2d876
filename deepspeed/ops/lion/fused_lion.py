"""Lion on the parameters' own device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedLion(torch.optim.Optimizer):
    """Lion by torch's multi-tensor kernels: a few launches a step whatever the number of parameters.

    State is `step` (an int of each parameter) and `exp_avg`, of the parameter's type.

    Args:
        params: parameters or groups of them, on one device.
        lr: learning rate.
        betas: weights of the moment in the update, and of the moment in its own decay.
        weight_decay: decoupled.
        set_grad_none: accepted for DeepSpeed's signature; `zero_grad` drops gradients unless told otherwise.

    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2; signature of
    DeepSpeed 0.19.8.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: recomputes the loss.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update_group(group)
        return loss

    def _update_group(self, group: dict[str, Any]) -> None:
        params = [param for param in group["params"] if param.grad is not None and param.numel() > 0]
        if not params:
            return
        for param in params:
            state = self.state[param]
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(param)
            state["step"] = int(state["step"]) + 1
        beta1, beta2 = group["betas"]
        lr = float(group["lr"])
        grads = [param.grad.to(param.dtype) for param in params]
        moments = [self.state[param]["exp_avg"] for param in params]
        directions = torch._foreach_lerp(moments, grads, 1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, directions, alpha=-lr)
        torch._foreach_lerp_(moments, grads, 1 - beta2)
