"""Adagrad on the host, in plain torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..tiled import TiledOptimizer


class DeepSpeedCPUAdagrad(TiledOptimizer):
    """Adagrad on host tensors: fp32, bf16 or fp16. State is `step` and `exp_avg_sq`, the sum of squares.

    Args:
        model_params: parameters or groups of them.
        lr: learning rate.
        eps: added to the root of the sum.
        weight_decay: added to the gradient.
        amsgrad: not supported.
        fp32_optimizer_states: keep the sum in fp32 whatever the parameter's type.
        adamw_mode: ignored; clients pass it to every host optimizer.

    Raises:
        NotImplementedError: amsgrad.

    Source: signature, state names and values of DeepSpeed 0.19.8; arithmetic of torch.optim.Adagrad.
    """

    moment_name = "exp_avg_sq"

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        *,
        adamw_mode: bool | None = None,
    ) -> None:
        if amsgrad:
            raise NotImplementedError(
                "amsgrad: expected False, got True. Adagrad has no such form: leave it out."
            )
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(
            model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        )

    def update_tile(
        self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, moment: torch.Tensor
    ) -> None:
        """Updates a tile in place. Args: see TiledOptimizer."""
        if group["weight_decay"] != 0:
            grad.add_(param, alpha=group["weight_decay"])
        moment.addcmul_(grad, grad)
        param.addcdiv_(grad, moment.sqrt().add_(group["eps"]), value=-float(group["lr"]))
