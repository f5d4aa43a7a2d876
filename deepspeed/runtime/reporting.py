"""What an engine tells about its run: times of its parts, events for monitors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer, Timer

__all__ = ["RunReporter"]

_PARTS = ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step")
_EVENT_NAMES = {
    "fwd": "forward",
    "bwd": "backward",
    "bwd_inner": "backward_inner",
    "bwd_allreduce": "backward_allreduce",
    "step": "step",
}


class RunReporter:
    """Times the parts of each micro-batch, and writes a step's numbers to the monitors.

    Goal: `wall_clock_breakdown` and the monitors, out of the engine's way when they are off: then nothing
    waits for the device and no loss is read.
    Pattern: each part is timed under two names, for the micro-batch and for the whole step.
    Lifetime: the engine's.

    Args:
        config: the configuration.

    Source: names of timers and events as in DeepSpeed 0.19.8, and `Train/Samples/train_loss`, which its
    documentation names: the mean over the step's micro-batches on rank 0.
    """

    def __init__(self, config: DeepSpeedConfig) -> None:
        self.timers: SynchronizedWallClockTimer | NoopTimer = (
            SynchronizedWallClockTimer() if config.wall_clock_breakdown else NoopTimer()
        )
        self.monitor = MonitorMaster(config)
        self._losses: list[torch.Tensor] = []
        self._has_loss_scale = config.fp16.enabled

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Around a part of a micro-batch.

        Args:
            name: one of fwd, bwd, bwd_inner, bwd_allreduce, step.
        """
        timers = self._pair(name)
        for timer in timers:
            timer.start()
        try:
            yield
        finally:
            for timer in timers:
                timer.stop()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a whole backward: inner part, and what is left of the reduction after it."""
        with self.part("bwd"):
            try:
                yield
            finally:
                for timer in self._reduction_timers():
                    if timer.started_:
                        timer.stop()

    @contextmanager
    def backward_inner(self) -> Iterator[None]:
        """Around autograd's part of a backward; the reduction is timed from its end."""
        with self.part("bwd_inner"):
            yield
        for timer in self._reduction_timers():
            timer.start()

    def saw_loss(self, loss: torch.Tensor) -> None:
        """Keep a micro-batch's loss, before any scaling, for the step's event."""
        if self.monitor.enabled:
            self._losses.append(loss.detach())

    def end_micro_step(self) -> None:
        """Log the micro-batch's times."""
        self.timers.log([f"{name}_microstep" for name in _PARTS])

    def end_step(self, samples: int, lr: list[float], loss_scale: float) -> None:
        """Write the step's events and log its times.

        Args:
            samples: of all ranks so far.
            lr: of each parameter group.
            loss_scale: at present.
        """
        if self.monitor.enabled:
            self.monitor.write_events(self._events(samples, lr, loss_scale))
            self._losses.clear()
        self.timers.log(_PARTS)

    def _pair(self, name: str) -> tuple[Timer, ...]:
        if isinstance(self.timers, NoopTimer):
            return ()
        return (self.timers(f"{name}_microstep"), self.timers(name))

    def _reduction_timers(self) -> tuple[Timer, ...]:
        return self._pair("bwd_allreduce")

    def _events(self, samples: int, lr: list[float], loss_scale: float) -> list[tuple[str, Any, int]]:
        values: dict[str, Any] = {}
        if self._losses:
            values["train_loss"] = torch.stack([loss.float().mean() for loss in self._losses]).mean().item()
        if lr:
            values["lr"] = lr[0]
        if self._has_loss_scale:
            values["loss_scale"] = loss_scale
        for name, timer in self.timers.get_timers().items():
            if name in _EVENT_NAMES:
                values[f"elapsed_time_ms_{_EVENT_NAMES[name]}"] = timer.elapsed(reset=False)
        return [(f"Train/Samples/{name}", value, samples) for name, value in values.items()]
