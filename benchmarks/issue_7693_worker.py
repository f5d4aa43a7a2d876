"""One run of issue_7693.py: a job whose memory is watched from outside, and noted phase by phase.

Runs under any interpreter that has torch and a `deepspeed`. Prints one line, `answer` and JSON. Phases inside
the step are seen where `deepspeed` has the two methods that the issue names, and calls them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import synthetic_job as job
import torch
from host_memory_worker import Account, fork_workers
from memory_timeline import Points, Timeline, corners

import deepspeed

Note = Callable[[str], None]

WATCHED_STEPS = 2
TIMED_STEPS = 9  # after them: nothing is watched, and no method is wrapped
WORKERS = 2
INSIDE = {"unscale_and_clip_grads": "unscale", "_optimizer_step": "Adam"}
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29693",
}


class DatedAccount(Account):
    """An account that also notes when a phase ended, and when it had been noted."""

    def mark(self, name: str) -> None:
        """Notes a phase that has ended."""
        job.synchronize(self._options)
        ended = time.monotonic()
        super().mark(name)
        self.phases[-1].update(ended=ended, noted=time.monotonic())

    def growth(self, timeline: dict[str, Points]) -> dict[str, Points]:
        """Returns the timeline in bytes a parameter above the baseline."""

        def above(nbytes: float, key: str) -> float:
            return round((nbytes - self.baseline[key]) / self._numel, 2)

        return {
            key: corners([(t, above(nbytes, key)) for t, nbytes in points])
            for key, points in timeline.items()
        }


def get_ready(options: argparse.Namespace) -> None:
    """What torch and the process group load for themselves is there before anything is counted."""
    deepspeed.init_distributed(dist_backend="nccl" if options.device == "cuda" else "gloo")
    if options.device == "cuda":
        torch.ones(8, 8, device="cuda").matmul(torch.ones(8, 8, device="cuda"))
        torch.distributed.all_reduce(torch.ones(1, device="cuda"))


@contextmanager
def notes_inside(optimizer: Any, note: Note) -> Iterator[None]:
    """Notes the ends of the methods of `INSIDE` while the context lasts."""

    def then_note(method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def call(*arguments: Any, **words: Any) -> Any:
            result = method(*arguments, **words)
            note(phase)
            return result

        return call

    found = [name for name in INSIDE if hasattr(optimizer, name)]
    for name in found:
        setattr(optimizer, name, then_note(getattr(optimizer, name), INSIDE[name]))
    try:
        yield
    finally:
        for name in found:
            delattr(optimizer, name)


class Training:
    """Trains step by step; the workers are forked where the options say, and live as long as this.

    Args:
        options: the command line.
        engine: what trains.
        account: notes phases.
    """

    def __init__(self, options: argparse.Namespace, engine: Any, account: Account) -> None:
        self._options = options
        self._engine = engine
        self._account = account
        self._batches: Iterator[torch.Tensor] | None = None
        self._fork_if("early")

    def watched_step(self, step: int) -> None:
        """One step that notes its phases; the first forks what does not fork early."""

        def note(name: str) -> None:
            self._account.mark(f"{name} {step}")
            if (name, step) == ("backward", 1):
                self._fork_if("between")

        with notes_inside(self._engine.optimizer, note):
            self.step(note)
        note("step")
        if step == 1:
            self._fork_if("late")

    def step(self, note: Note = lambda name: None) -> float:
        """One step, whose backward passes are noted. Returns the seconds of its `engine.step()`."""
        for micro in range(1, self._options.gas + 1):
            batch = job.make_batch(self._options)
            if self._batches is not None:
                batch = next(self._batches).to(batch)
            self._engine.backward(job.loss_of(self._engine(batch)))
            if micro == self._options.gas:
                note("backward")
            elif micro == 1:
                note("first backward")
            job.synchronize(self._options)
            start = time.perf_counter()
            self._engine.step()
            job.synchronize(self._options)
        return time.perf_counter() - start

    def _fork_if(self, place: str) -> None:
        if self._options.fork == place:
            self._batches = fork_workers(self._options, self._account)


def patches() -> list[str]:
    """Returns the names of the patch's replacements, where it was asked for.

    Raises:
        RuntimeError: it was asked for, and replaced nothing.
    """
    if os.environ.get("DEEPSPEED_LEAN") != "1":
        return []
    import deepspeed_lean

    if not deepspeed_lean.applied():
        raise RuntimeError("DEEPSPEED_LEAN: expected replacements, got none. The log above says why.")
    return list(deepspeed_lean.applied())


def main() -> None:
    """Runs, and answers once."""
    parser = argparse.ArgumentParser(description=__doc__)
    job.add_arguments(parser)
    parser.add_argument("--fork", choices=["none", "early", "between", "late"], required=True)
    options = parser.parse_args()
    options.workers = 0 if options.fork == "none" else WORKERS
    os.environ.update({**ALONE, **os.environ})
    model = job.make_model(options)
    facts = {**job.facts(options, model), "patches": patches()}
    get_ready(options)
    timeline = Timeline()
    account = DatedAccount(facts["numel"], options)
    account.mark("start")
    engine = job.make_engine(options, model)
    account.mark("initialize")
    training = Training(options, engine, account)
    for step in range(1, WATCHED_STEPS + 1):
        training.watched_step(step)
    points = timeline.stop()
    seconds = [training.step() for _ in range(TIMED_STEPS)]
    account.mark("last step")
    del training
    if options.workers:
        account.mark("workers ended")
    engine.destroy()
    del engine
    account.mark("destroy")
    timeline.close()
    job.answer(
        {**facts, "phases": account.phases, "timeline": account.growth(points), "step_seconds": seconds}
    )
    # Threads of a library may hold a process that is done.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
