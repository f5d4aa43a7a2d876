"""Adam and AdamW by torch's own fused kernel, under DeepSpeed's argument names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

# Since torch 2.7 AdamW is a flag of Adam; in 2.6 it is a class of its own, with internals of its own.
_ADAM_HAS_DECOUPLED_DECAY = (
    "decoupled_weight_decay" in inspect.signature(torch.optim.Adam.__init__).parameters
)


class FusedAdam(torch.optim.Adam):
    """torch.optim.AdamW(fused=True), or Adam, with DeepSpeed's arguments: one kernel a step on any device.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        bias_correction: only True is supported.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        adam_w_mode: AdamW if true, else Adam.
        weight_decay: decoupled (AdamW) or added to the gradient (Adam). 0 in both modes unless given.
        amsgrad: use the largest second moment so far.
        set_grad_none: what `zero_grad` does unless told otherwise.
        adamw_mode: the same as `adam_w_mode`, as DeepSpeedCPUAdam spells it.

    Raises:
        NotImplementedError: bias_correction is False.

    Source: signature of DeepSpeed 0.19.8.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        *,
        adamw_mode: bool | None = None,
    ) -> None:
        if not bias_correction:
            raise NotImplementedError(
                "bias_correction: expected True, got False. torch's kernel always corrects: leave it out."
            )
        self.adam_w_mode = adam_w_mode if adamw_mode is None else adamw_mode
        self.set_grad_none = set_grad_none
        flag = {"decoupled_weight_decay": self.adam_w_mode} if _ADAM_HAS_DECOUPLED_DECAY else {}
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            fused=True,
            **flag,
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: recomputes the loss.

        Returns:
            What the closure returned, or None.
        """
        if not self.adam_w_mode or _ADAM_HAS_DECOUPLED_DECAY:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        weight_decays = [group["weight_decay"] for group in self.param_groups]
        try:
            self._decay()
            super().step()
        finally:
            for group, weight_decay in zip(self.param_groups, weight_decays, strict=True):
                group["weight_decay"] = weight_decay
        return loss

    @torch.no_grad()
    def _decay(self) -> None:
        """Applies decoupled decay in a pass of its own, and clears it in the groups."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.mul_(1 - group["lr"] * group["weight_decay"])
            group["weight_decay"] = 0.0

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears gradients.

        Args:
            set_to_none: drop them instead of zeroing; by default as `set_grad_none` said.
        """
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)
