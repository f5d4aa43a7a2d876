"""Times steps of stock's engine and of a patched one in turn, in one process. Reports seconds a step."""

from __future__ import annotations

import statistics
import time
from typing import Any

import memory
import peer_job
import torch
from reporting import report

import deepspeed
import deepspeed_lean

LAYERS = 40  # 42 million parameters
STEPS = 5


def main() -> None:
    torch.distributed.init_process_group("gloo")
    peer_job.spare_stock(deepspeed)
    report({str(stage): times(stage) for stage in (2, 3)})


def times(stage: int) -> dict[str, float]:
    """Medians of `engine.step` alone, after one step to warm up."""
    engines = {}
    for name in ("stock", "patched"):
        if name == "patched":
            deepspeed_lean.apply()
        engines[name] = memory.make_engine({"stage": stage, "gas": 1}, memory.make_model(LAYERS))
        deepspeed_lean.revert()
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(STEPS + 1):
        for name, engine in engines.items():
            taken[name].append(step(engine))
    for engine in engines.values():
        engine.destroy()
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}


def step(engine: Any) -> float:
    engine.backward(engine(torch.ones(4, memory.HIDDEN).bfloat16()).float().square().mean())
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
