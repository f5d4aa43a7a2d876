"""One process of engine_step.py: an engine that steps whenever told to, and times the parts.

With `--roof` instead: the memory traffic of this rank's part of the step without arithmetic, on arrays of the
same kind.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

import synthetic_job as job
import torch

# Enough to be far out of any cache; the time a parameter does not change beyond.
ROOF_NUMEL = 200_000_000


def engine_cycle(options: argparse.Namespace, engine) -> Callable[[], dict[str, float]]:
    """Returns a function that runs one optimizer step and returns the seconds of its parts."""
    batch = job.make_batch(options)

    def cycle() -> dict[str, float]:
        seconds = {"backward": 0.0, "step": 0.0}
        start = time.perf_counter()
        for _ in range(options.gas):
            loss = job.loss_of(engine(batch))
            job.synchronize(options)
            before = time.perf_counter()
            engine.backward(loss)
            job.synchronize(options)
            middle = time.perf_counter()
            engine.step()
            job.synchronize(options)
            seconds["backward"] += middle - before
            seconds["step"] += time.perf_counter() - middle
        return {**seconds, "all": time.perf_counter() - start}

    return cycle


def roof_cycle(options: argparse.Namespace) -> Callable[[], dict[str, float]]:
    """Returns a function that moves the bytes of this rank's step and returns the seconds for all of them."""
    from deepspeed.ops.adam.host_threads import host_threads
    from op_builder import CPUAdamBuilder

    op = CPUAdamBuilder().load()
    shard_numel = options.numel // int(os.environ["WORLD_SIZE"])
    numel = min(shard_numel, ROOF_NUMEL)
    master, exp_avg, exp_avg_sq = (torch.zeros(numel) for _ in range(3))
    grad = torch.zeros(numel, dtype=job.DTYPE if options.gas == 1 else torch.float32)
    out = torch.zeros(numel, dtype=job.DTYPE)

    def cycle() -> dict[str, float]:
        start = time.perf_counter()
        op.roof(master, grad, exp_avg, exp_avg_sq, out, host_threads())
        return {"step": (time.perf_counter() - start) * shard_numel / numel}

    return cycle


def main() -> None:
    """Gets ready, then answers one line at a time."""
    parser = argparse.ArgumentParser()
    job.add_arguments(parser)
    parser.add_argument("--roof", action="store_true")
    parser.add_argument("--warm-up", type=int, required=True)
    options = parser.parse_args()
    if options.roof:
        cycle, facts = roof_cycle(options), {}
    else:
        model = job.make_model(options)
        facts = job.facts(options, model)
        cycle = engine_cycle(options, job.make_engine(options, model))
    for _ in range(options.warm_up):
        cycle()
    job.answer(facts)
    for _ in sys.stdin:
        job.answer(cycle())


if __name__ == "__main__":
    main()
