"""Loss scaling for fp16: gradients too small for half precision are multiplied up before backward.

Pure Python: every rank feeds the same overflow decision, so every rank holds the same scale without
communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.config_sections import FP16Config
from deepspeed.utils.logging import log_dist

__all__ = ["DynamicLossScaler", "LossScaler", "LossScalerBase", "ScaleRules", "create_loss_scaler"]


class LossScalerBase:
    """A factor on the loss. ``dynamic`` says whether it follows overflows.

    Args:
        scale: The factor at the start.
    """

    dynamic = False

    def __init__(self, scale: float) -> None:
        self.cur_scale = float(scale)

    @property
    def loss_scale(self) -> float:
        """The present factor."""
        return self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Take note of a step.

        Args:
            overflow: Whether its gradients were not finite; the same on every rank.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {"cur_scale": self.cur_scale}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self.cur_scale = float(state_dict["cur_scale"])


class LossScaler(LossScalerBase):
    """A fixed factor."""


@dataclass(frozen=True)
class ScaleRules:
    """How a dynamic scale moves.

    window: clean steps in a row before it doubles. min_scale: its floor. hysteresis: overflows in a row of
        windows
    before it halves. consecutive_hysteresis: a clean step refills the hysteresis, instead of a full window.
    raise_error_at_min_scale: an overflow at the floor ends training instead of being skipped for ever.
    """

    window: int = 1000
    min_scale: float = 1.0
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    raise_error_at_min_scale: bool = True


class DynamicLossScaler(LossScalerBase):
    """A factor that halves on overflow and doubles after a window of clean steps.

    Args:
        init_scale: The factor at the start.
        rules: How it moves; by default as DeepSpeed's.

    Source: the sequences of scales of DeepSpeed 0.19.8's DynamicLossScaler, observed step by step.
    """

    dynamic = True

    def __init__(self, init_scale: float, rules: ScaleRules | None = None) -> None:
        super().__init__(init_scale)
        self.rules = rules or ScaleRules()
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.cur_hysteresis = self.rules.hysteresis

    def update_scale(self, overflow: bool) -> None:
        """Take note of a step.

        Args:
            overflow: Whether its gradients were not finite; the same on every rank.

        Raises:
            RuntimeError: An overflow at the floor, if the rules say so.
        """
        if overflow:
            self._shrink()
            self.last_overflow_iter = self.cur_iter
        else:
            self._grow_if_due()
        self.cur_iter += 1

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers: the scale and its counters. The rules stay with the configuration."""
        return {
            "cur_scale": self.cur_scale,
            "cur_iter": self.cur_iter,
            "last_overflow_iter": self.last_overflow_iter,
            "cur_hysteresis": self.cur_hysteresis,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned; counters that are absent stay as they are."""
        super().load_state_dict(state_dict)
        self.cur_iter = int(state_dict.get("cur_iter", self.cur_iter))
        self.last_overflow_iter = int(state_dict.get("last_overflow_iter", self.last_overflow_iter))
        self.cur_hysteresis = int(state_dict.get("cur_hysteresis", self.cur_hysteresis))

    def _shrink(self) -> None:
        if self.cur_hysteresis > 1:
            self.cur_hysteresis -= 1
            log_dist(
                f"OVERFLOW: step skipped, loss scale stays {self.cur_scale:g} "
                f"(hysteresis {self.cur_hysteresis + 1} -> {self.cur_hysteresis})",
                ranks=[0],
            )
            return
        if self.cur_scale == self.rules.min_scale:
            self._at_floor()
            return
        old = self.cur_scale
        self.cur_scale = max(old / 2.0, self.rules.min_scale)
        log_dist(f"OVERFLOW: step skipped, loss scale {old:g} -> {self.cur_scale:g}", ranks=[0])

    def _at_floor(self) -> None:
        if not self.rules.raise_error_at_min_scale:
            log_dist(f"OVERFLOW: step skipped, loss scale is at its floor, {self.cur_scale:g}", ranks=[0])
            return
        raise RuntimeError(
            f"fp16.min_loss_scale: expected finite gradients at the smallest loss scale, {self.cur_scale:g}, "
            "got an overflow: the loss scale is already at minimum and cannot decrease. The model itself "
            "produces inf or NaN in fp16: use bf16, lower the learning rate, or look for the first bad layer."
        )

    def _grow_if_due(self) -> None:
        clean = self.cur_iter - self.last_overflow_iter - 1
        due = clean > 0 and clean % self.rules.window == 0
        if due or self.rules.consecutive_hysteresis:
            self.cur_hysteresis = self.rules.hysteresis
        if due:
            old = self.cur_scale
            self.cur_scale = old * 2.0
            log_dist(
                f"loss scale {old:g} -> {self.cur_scale:g} after {self.rules.window} clean steps", ranks=[0]
            )


def create_loss_scaler(fp16: FP16Config | None) -> LossScalerBase:
    """Return the loss scaler that a configuration asks for.

    Args:
        fp16: The fp16 section; None for bf16 and fp32, which need no scaling.
    """
    if fp16 is None:
        return LossScaler(1.0)
    if not fp16.dynamic_loss_scale:
        return LossScaler(fp16.loss_scale)
    rules = ScaleRules(
        window=fp16.loss_scale_window,
        min_scale=fp16.min_loss_scale,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
    )
    return DynamicLossScaler(fp16.initial_loss_scale, rules)
