"""One rank of several_gpus.py's trace: one optimizer step with its micro-batches under torch's profiler."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import synthetic_job as job
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from trace_overlap import TILE_COMPUTED, TILE_SUBMITTED, host_waits, transfers

from deepspeed.ops.adam import DeepSpeedCPUAdam


def mark_host_tiles() -> None:
    """Lets the trace show when tiles are handed to the host optimizer's threads, and when they are there."""
    submit = DeepSpeedCPUAdam.submit_slice

    def marked(*arguments: Any) -> Any:
        with record_function(TILE_SUBMITTED):
            wait = submit(*arguments)

        def marked_wait() -> None:
            wait()
            with record_function(TILE_COMPUTED):
                pass

        return marked_wait

    DeepSpeedCPUAdam.submit_slice = marked  # type: ignore[method-assign]


def train_step(options: argparse.Namespace, engine: Any, batch: torch.Tensor) -> None:
    """One optimizer step, its parts marked; nothing is waited for between them."""
    for _ in range(options.gas):
        with record_function("forward"):
            loss = job.loss_of(engine(batch))
        with record_function("backward"):
            engine.backward(loss)
        with record_function("step"):
            engine.step()


def trace(options: argparse.Namespace, engine: Any, batch: torch.Tensor) -> list[dict[str, Any]]:
    """The events of one step."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (options.device == "cuda")
    with profile(activities=activities) as profiler:
        train_step(options, engine, batch)
        job.synchronize(options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        if options.keep and os.environ["RANK"] == "0":
            Path(options.keep).write_bytes(path.read_bytes())
        return json.loads(path.read_text())["traceEvents"]


def main() -> None:
    """Warms up, traces once, answers."""
    parser = argparse.ArgumentParser()
    job.add_arguments(parser)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--keep", help="file for rank 0's trace")
    options = parser.parse_args()
    mark_host_tiles()
    engine = job.make_engine(options, job.make_model(options))
    batch = job.make_batch(options)
    for _ in range(options.warm_up):
        train_step(options, engine, batch)
    events = trace(options, engine, batch)
    found = {kind: transfer._asdict() for kind, transfer in transfers(events).items()}
    job.answer({"transfers": found, "host_waits": [wait._asdict() for wait in host_waits(events)]})
    sys.stdin.read()


if __name__ == "__main__":
    main()
