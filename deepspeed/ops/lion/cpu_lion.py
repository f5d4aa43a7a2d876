"""Lion on the host, in plain torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..tiled import TiledOptimizer


class DeepSpeedCPULion(TiledOptimizer):
    """Lion on host tensors: fp32, bf16 or fp16 parameters. State is `step` and `exp_avg`.

    Args:
        model_params: parameters or groups of them.
        lr: learning rate.
        betas: weights of the moment in the update, and of the moment in its own decay.
        weight_decay: decoupled.
        fp32_optimizer_states: keep the moment in fp32 whatever the parameter's type.
        adamw_mode: ignored; clients pass it to every host optimizer.

    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2; signature and
    state names of DeepSpeed 0.19.8.
    """

    moment_name = "exp_avg"

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
        *,
        adamw_mode: bool | None = None,
    ) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update_tile(
        self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, moment: torch.Tensor
    ) -> None:
        """Updates a tile in place. Args: see TiledOptimizer."""
        beta1, beta2 = group["betas"]
        lr = float(group["lr"])
        direction = moment.lerp(grad, 1 - beta1).sign_()
        param.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
        moment.lerp_(grad, 1 - beta2)
