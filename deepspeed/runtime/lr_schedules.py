"""Learning-rate schedules named in DeepSpeed configurations.

A schedule writes ``group["lr"]`` of live parameter groups; it never copies or replaces a group. One
``step()`` is one optimizer step; ``last_batch_iteration`` counts them from 0 and is the whole state.

Source: parameters and values of DeepSpeed 0.19.8, observed step by step; tests/unit/data/lr_schedules.json
holds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepspeed.runtime.named_class import construct
from deepspeed.utils.logging import logger

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_lr_scheduler",
]

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


def _check_optimizer(optimizer: Any) -> None:
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer: expected an object with param_groups, got {type(optimizer).__name__}.")


def _per_group(value: float | Sequence[float], count: int, name: str) -> list[float]:
    """Return one number per parameter group from a number or a sequence of them."""
    values: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ValueError(
            f"{name}: expected 1 value per parameter group ({count}), got {len(values)}. "
            "Give one number for all, or one for each."
        )
    for number in values:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ValueError(
                f"{name}: expected a number or one per parameter group, got {number!r}. Correct it."
            )
    return values


class _Schedule:
    """What the schedules share: counting steps, writing rates, saving the counter.

    Subclasses compute rates from ``last_batch_iteration`` in ``get_lr`` and call ``_start`` at the end of
    construction.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        _check_optimizer(optimizer)
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None

    def get_lr(self) -> list[float]:
        """Return the rates of the current iteration, one per parameter group."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """Return the rates that were last written, one per parameter group.

        Raises:
            AssertionError: No rate was written yet; clients look for "need to call step" in it.
        """
        if self._last_lr is None:
            raise AssertionError("need to call step() first")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one iteration, or go to a given one, and write its rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return the counter."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Take over a counter; rates follow at the next ``step()``, as the optimizer saves its own."""
        self.last_batch_iteration = sd["last_batch_iteration"]

    def _write(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]


class LRRangeTest(_Schedule):
    """Raise the rate from a minimum without end, to find the largest that trains.

    Args:
        optimizer: What to schedule.
        lr_range_test_min_lr: First rate, or one for each parameter group.
        lr_range_test_step_size: Iterations of an interval.
        lr_range_test_step_rate: What an interval adds, in first rates.
        lr_range_test_staircase: Whether the rate grows at the end of an interval only.
        last_batch_iteration: Iterations done before, less 1.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = _per_group(lr_range_test_min_lr, len(optimizer.param_groups), "lr_range_test_min_lr")
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._write(self.min_lr)

    def get_lr(self) -> list[float]:
        """Return the rates of the current iteration."""
        intervals = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            intervals = math.floor(intervals)
        increase = 1 + self.step_rate * intervals
        return [minimum * increase for minimum in self.min_lr]


class OneCycle(_Schedule):
    """One rise and fall of the rate, mirrored in Adam's first beta, then an optional decay of both.

    Momentum is cycled only when the optimizer has betas; its second beta is then 0.99, as in DeepSpeed.

    Args:
        optimizer: What to schedule.
        cycle_min_lr, cycle_max_lr: Rates at the ends and at the top, or one for each parameter group.
        decay_lr_rate, decay_mom_rate: After the cycle, what a decay step adds to the divisor of the rate and
        to the
            factor of the momentum.
        cycle_first_step_size, cycle_second_step_size: Iterations of the rise and of the fall (as the rise if
        None). cycle_first_stair_count, cycle_second_stair_count: Treads of the rise and of the fall (as the
        rise if None);
            0 for a ramp.
        decay_step_size: Iterations of a decay step; 0 for no decay.
        cycle_momentum: Whether the momentum is cycled.
        cycle_min_mom, cycle_max_mom: Momenta at the top and at the ends.
        last_batch_iteration: Iterations done before, less 1.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        groups = len(optimizer.param_groups)
        self.min_lrs = _per_group(cycle_min_lr, groups, "cycle_min_lr")
        self.max_lrs = _per_group(cycle_max_lr, groups, "cycle_max_lr")
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.step_sizes = (cycle_first_step_size, second)
        self.total_size = cycle_first_step_size + second
        self.stair_counts = (
            cycle_first_stair_count,
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count,
        )
        self.decay = (decay_step_size, decay_lr_rate, decay_mom_rate)
        self.moms = (cycle_min_mom, cycle_max_mom)
        self.cycle_momentum = cycle_momentum and self._has_betas()
        if last_batch_iteration == -1:
            self._begin()

    def _has_betas(self) -> bool:
        if "betas" in getattr(self.optimizer, "defaults", {}):
            return True
        logger.warning(
            "scheduler.params.cycle_momentum: expected an optimizer with betas, got %s. Its momentum stays.",
            type(self.optimizer).__name__,
        )
        return False

    def _begin(self) -> None:
        self._write(self.min_lrs)
        self._last_lr = None
        if self.cycle_momentum:
            self._write_momentum([self.moms[0]] * len(self.min_lrs))

    def _write_momentum(self, momenta: Sequence[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
            group["betas"] = (momentum, 0.99)

    def _height(self) -> float:
        """Return the place in the cycle: 0 at its ends, 1 at its top."""
        first, second = self.step_sizes
        done = (self.last_batch_iteration + 1) % self.total_size
        if done <= first:
            left, size, stairs = done, first, self.stair_counts[0]
        else:
            left, size, stairs = self.total_size - done, second, self.stair_counts[1]
        return math.floor(left * stairs / size) / stairs if stairs else left / size

    def _decay_intervals(self) -> float:
        step_size = self.decay[0]
        return (self.last_batch_iteration - self.total_size + 1) / step_size if step_size else 0.0

    def _in_cycle(self) -> bool:
        return self.last_batch_iteration < self.total_size

    def get_lr(self) -> list[float]:
        """Return the rates of the current iteration."""
        if self._in_cycle():
            height = self._height()
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        decay = 1 + self.decay[1] * self._decay_intervals()
        return [low / decay for low in self.min_lrs]

    def get_mom(self) -> list[float] | None:
        """Return the first betas of the current iteration, or None when momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        low, high = self.moms
        if self._in_cycle():
            momentum = high - (high - low) * self._height()
        else:
            momentum = high * (1 + self.decay[2] * self._decay_intervals())
        return [momentum] * len(self.min_lrs)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one iteration, or go to a given one, and write its rates and momenta."""
        super().step(last_batch_iteration)
        momenta = self.get_mom()
        if momenta is not None:
            self._write_momentum(momenta)


def _warmup_curve(warmup_type: str, warmup_num_steps: int) -> Callable[[int], float]:
    """Return the curve from 0 at iteration 0 to 1 at the end of warm-up."""
    if isinstance(warmup_num_steps, bool) or not isinstance(warmup_num_steps, int) or warmup_num_steps <= 0:
        raise ValueError(
            f"warmup_num_steps: expected a positive integer, got {warmup_num_steps!r}. "
            "Use 1 for no warm-up beyond the first step."
        )
    if warmup_type == "linear":
        return lambda iteration: iteration / max(2, warmup_num_steps)
    if warmup_type != "log":
        logger.warning("warmup_type: expected 'log' or 'linear', got %r. Warming up by 'log'.", warmup_type)
    inverse_log = 1.0 / math.log(max(2, warmup_num_steps))
    return lambda iteration: inverse_log * math.log(iteration + 1)


class WarmupLR(_Schedule):
    """Raise the rate from a minimum to a maximum, logarithmically or linearly, then hold it.

    Args:
        optimizer: What to schedule.
        warmup_min_lr: First rate, or one for each parameter group.
        warmup_max_lr: Last rate, or one for each parameter group; None for each group's own rate.
        warmup_num_steps: Iterations of the rise; at least 2 are made.
        warmup_type: "log" or "linear".
        last_batch_iteration: Iterations done before, less 1.

    Raises:
        ValueError: warmup_num_steps is no positive integer, or a sequence does not fit the parameter groups.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        groups = optimizer.param_groups
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in groups]
        self._curve = _warmup_curve(warmup_type, warmup_num_steps)
        self.min_lrs = _per_group(warmup_min_lr, len(groups), "warmup_min_lr")
        self.max_lrs = _per_group(warmup_max_lr, len(groups), "warmup_max_lr")
        self.warmup_num_steps = max(2, warmup_num_steps)
        if last_batch_iteration == -1:
            self._write(self.get_lr())

    def get_lr(self) -> list[float]:
        """Return the rates of the current iteration; before the first, the minimum."""
        gamma = self._gamma() if self.last_batch_iteration >= 0 else 0.0
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return self._curve(self.last_batch_iteration)
        return self._gamma_after()

    def _gamma_after(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """``WarmupLR``, then a straight line down to the minimum.

    Args:
        optimizer: What to schedule.
        total_num_steps: Iteration at which the minimum is reached.
        warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration: As ``WarmupLR``.

    Raises:
        ValueError: As ``WarmupLR``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 1e-3,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )
        _warn_short_total(total_num_steps, warmup_num_steps)

    def _gamma_after(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Schedule):
    """Warm-up, then half a cosine down; both as ratios of each group's own rate at construction.

    Args:
        optimizer: What to schedule.
        total_num_steps: Iteration at which the last ratio is reached.
        warmup_min_ratio, cos_min_ratio: First and last ratio.
        warmup_num_steps, warmup_type, last_batch_iteration: As ``WarmupLR``.

    Raises:
        ValueError: As ``WarmupLR``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self._curve = _warmup_curve(warmup_type, warmup_num_steps)
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        _warn_short_total(total_num_steps, warmup_num_steps)
        if last_batch_iteration == -1:
            self._write(self.get_lr())

    def get_lr_ratio(self) -> float:
        """Return the ratio of the current iteration; before the first, 0."""
        iteration = self.last_batch_iteration
        if iteration < 0:
            return 0.0
        if iteration < self.warmup_num_steps:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * self._curve(iteration)
        span = max(1, self.total_num_steps - self.warmup_num_steps)
        done = min(1.0, (iteration - self.warmup_num_steps + 1) / span)
        return self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2

    def get_lr(self) -> list[float]:
        """Return the rates of the current iteration."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


def _warn_short_total(total_num_steps: int, warmup_num_steps: int) -> None:
    if total_num_steps < warmup_num_steps:
        logger.warning(
            "total_num_steps: expected at least warmup_num_steps (%s), got %s. "
            "The rate drops to its minimum after warm-up.",
            warmup_num_steps,
            total_num_steps,
        )


def build_lr_scheduler(name: str, params: Mapping[str, Any], optimizer: Any) -> Any:
    """Build the schedule that a configuration names.

    Args:
        name: One of VALID_LR_SCHEDULES or a class of torch.optim.lr_scheduler.
        params: Keyword arguments of its constructor.
        optimizer: What it schedules: an object with live ``param_groups``; torch's classes need a torch
            Optimizer.

    Raises:
        ValueError: No optimizer, an unknown name, an unknown or a missing parameter, a wrong value.
    """
    if optimizer is None:
        raise ValueError(
            f"scheduler.type: expected an optimizer for {name} to schedule, got none. "
            "Add an optimizer section to the configuration or pass optimizer= to initialize."
        )
    own = {cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
    cls: Any = own.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if not isinstance(cls, type):
        raise ValueError(
            f"scheduler.type: expected one of {', '.join(VALID_LR_SCHEDULES)} or a class of "
            f"torch.optim.lr_scheduler, got {name!r}. Pass other schedules to deepspeed.initialize as "
            "lr_scheduler=."
        )
    return construct("scheduler", cls, optimizer, params)
