"""Timers of a training loop, which wait for the device before they look at the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.utils.logging import log_dist

__all__ = ["NoopTimer", "SynchronizedWallClockTimer", "ThroughputTimer", "Timer"]

_MSEC = 1000.0
_GIB = float(1 << 30)


class Timer:
    """The time between `start` and `stop`, summed up, in milliseconds.

    Args:
        name: for the log.
    """

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._began_s = 0.0
        self._total_ms = 0.0
        self._count = 0

    def start(self) -> None:
        """Begin, once the device has done what it was given.

        Raises:
            RuntimeError: the timer runs already.
        """
        if self.started_:
            raise RuntimeError(f"{self.name_}: expected a timer that is stopped, got a running one. Stop it.")
        get_accelerator().synchronize()
        self._began_s, self.started_ = time.perf_counter(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End, once the device has done what it was given.

        Args:
            reset: begin the sum anew with this time.
            record: accepted; every time is summed up.

        Raises:
            RuntimeError: the timer does not run.
        """
        if not self.started_:
            raise RuntimeError(f"{self.name_}: expected a running timer, got a stopped one. Start it first.")
        get_accelerator().synchronize()
        passed_ms = (time.perf_counter() - self._began_s) * _MSEC
        if reset:
            self.reset()
        self._total_ms += passed_ms
        self._count += 1
        self.started_ = False

    def reset(self) -> None:
        """Forget everything."""
        self.started_, self._total_ms, self._count = False, 0.0, 0

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds so far.

        Args:
            reset: forget them.
        """
        running = self.started_
        if running:
            self.stop()
        total = self._total_ms
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """Milliseconds of one interval."""
        return self._total_ms / self._count if self._count else 0.0


class SynchronizedWallClockTimer:
    """Timers by name: `timers("forward").start()`.

    Source: names of class and methods, and the line of the log, as in DeepSpeed 0.19.8.
    """

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        """The timer of that name; made at the first call."""
        return self.timers.setdefault(name, Timer(name))

    def get_timers(self) -> dict[str, Timer]:
        """All timers by name."""
        return self.timers

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log some timers in one line.

        Args:
            names: which; those that never ran are left out.
            normalizer: what to divide by.
            reset: forget the times.
            memory_breakdown: add the device's memory.
            ranks: who logs; rank 0 by default.
        """
        known = [name for name in names if name in self.timers]
        times = [f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in known]
        memory = [self.memory_usage()] if memory_breakdown else []
        log_dist(" | ".join(["time (ms)", *times, *memory]), ranks=ranks or [0])

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Mean milliseconds of some timers by name.

        Args:
            names: which; those that never ran are left out.
            normalizer: what to divide by.
            reset: forget the times.
        """
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        if reset:
            for name in means:
                self.timers[name].reset()
        return means

    @staticmethod
    def memory_usage() -> str:
        """The device's memory in use, for a log."""
        accelerator = get_accelerator()
        used, peak = accelerator.memory_allocated() / _GIB, accelerator.max_memory_allocated() / _GIB
        return f"mem_allocated: {used:.4f} GB | max_mem_allocated: {peak:.4f} GB"


class NoopTimer:
    """In place of timers when nothing is timed: nothing waits for the device."""

    class Timer:
        """Does nothing."""

        def start(self) -> None:
            """Do nothing."""

        def stop(self, **kwargs: Any) -> None:
            """Do nothing."""

        def reset(self) -> None:
            """Do nothing."""

        def elapsed(self, **kwargs: Any) -> float:
            """Return 0."""
            return 0.0

        def mean(self) -> float:
            """Return 0."""
            return 0.0

    def __call__(self, name: str) -> NoopTimer.Timer:
        """A timer that does nothing."""
        return self.Timer()

    def get_timers(self) -> dict[str, Timer]:
        """None."""
        return {}

    def log(self, names: Sequence[str], **kwargs: Any) -> None:
        """Do nothing."""

    def get_mean(self, names: Sequence[str], **kwargs: Any) -> dict[str, float]:
        """None."""
        return {}


class ThroughputTimer:
    """Samples a second, running average since the first steps were over.

    Args:
        config: section `timers.throughput`: `enabled`, and `synchronized` to wait for the device.
        batch_size: samples of a step over all ranks.
        start_step: steps that are left out of the average.
        steps_per_output: steps between reports; None for none.
        monitor_memory: accepted; see `deepspeed.utils.see_memory_usage`.
        logging_fn: called with each report; the package's log on rank 0 by default.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.config = config
        self.batch_size = max(1, batch_size)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.logging = logging_fn or (lambda text: log_dist(text, ranks=[0]))
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0  # seconds
        self._began_s: float | None = None

    def update_epoch_count(self) -> None:
        """Begin another epoch in the reports."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begin a micro-batch."""
        if self.config.enabled and self._began_s is None:
            self._began_s = self._now_s()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-batch.

        Args:
            global_step: an optimizer step ends with it.
            report_speed: report at multiples of `steps_per_output`.
        """
        if not self.config.enabled or self._began_s is None:
            return
        self.micro_step_count += 1
        self.global_step_count += int(global_step)
        self.step_elapsed_time += self._now_s() - self._began_s
        self._began_s = None
        if not global_step:
            return
        if self.global_step_count > self.start_step:
            self.total_elapsed_time += self.step_elapsed_time
            every = self.steps_per_output
            if report_speed and every and self.global_step_count % every == 0:
                self._report()
        self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Samples a second so far; minus infinity before there are any, as in DeepSpeed."""
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / self.total_elapsed_time if steps > 0 else float("-inf")

    def _report(self) -> None:
        self.logging(
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/"
            f"global_step={self.global_step_count}, RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
            f"CurrSamplesPerSec={self.batch_size / self.step_elapsed_time}"
        )

    def _now_s(self) -> float:
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.perf_counter()
