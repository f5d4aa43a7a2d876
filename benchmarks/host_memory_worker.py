"""One run of host_memory.py: a job that notes what it takes from the machine, phase by phase.

Runs on Linux, under any interpreter that has torch and a `deepspeed`. All figures are growth since the model
stood on its device, in bytes a parameter.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import synthetic_job as job
import torch
from proc_memory import family_pss_nbytes, status_nbytes
from torch.utils.data import DataLoader, IterableDataset


class Batches(IterableDataset):
    """Batches without end."""

    def __init__(self, hidden: int) -> None:
        self._hidden = hidden

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.randn(job.ROWS, self._hidden)


class Account:
    """Growth of this process and of its family since the account was opened.

    Args:
        numel: parameters of the model.
        options: names the device.
    """

    def __init__(self, numel: int, options: argparse.Namespace) -> None:
        self.phases: list[dict[str, float | str]] = []
        self._numel = numel
        self._options = options
        self.baseline = _settled(options)
        _forget_peak()

    def mark(self, name: str) -> None:
        """Notes a phase that has ended; its peak counts from the phase before."""
        peak_nbytes = status_nbytes("self", "VmHWM")
        now = {**_settled(self._options), "peak": peak_nbytes}
        baseline = {**self.baseline, "peak": self.baseline["rss"]}
        growth = {key: (value - baseline[key]) / self._numel for key, value in now.items()}
        device_peak = _device_peak_nbytes(self._options) / self._numel
        self.phases.append({"phase": name, **growth, "device peak": device_peak})
        _forget_peak()


def _settled(options: argparse.Namespace) -> dict[str, int]:
    """Bytes in use once the device is idle: RSS, the family's share of all pages, and the device."""
    job.synchronize(options)
    gc.collect()
    on_device = torch.cuda.memory_allocated() if options.device == "cuda" else 0
    return {
        "rss": status_nbytes("self", "VmRSS"),
        "tree": family_pss_nbytes(os.getpid()),
        "device": on_device,
    }


def _device_peak_nbytes(options: argparse.Namespace) -> int:
    """The most that the device held so far, the weights among it."""
    return torch.cuda.max_memory_allocated() if options.device == "cuda" else 0


def _forget_peak() -> None:
    """Lets VmHWM start again from the present RSS."""
    Path("/proc/self/clear_refs").write_text("5")


def train(options: argparse.Namespace, account: Account, engine) -> None:
    """Trains a few steps; the workers are forked where the options say, and live to the end."""
    batches = None
    if options.fork_at == "initialize":
        batches = fork_workers(options, account)
    for step in range(1, options.steps + 1):
        for _ in range(options.gas):
            batch = job.make_batch(options)
            if batches is not None:
                batch = next(batches).to(batch)
            engine.backward(job.loss_of(engine(batch)))
            if step == 1 and engine.is_gradient_accumulation_boundary():
                account.mark("backward 1")
            engine.step()
        account.mark(f"step {step}")
        if step == 1 and options.fork_at == "step1":
            batches = fork_workers(options, account)


def fork_workers(options: argparse.Namespace, account: Account) -> Iterator[torch.Tensor] | None:
    """Returns an iterator over batches made by forked workers, or None without any."""
    if not options.workers:
        return None
    dataset = Batches(options.hidden)
    loader = DataLoader(dataset, None, num_workers=options.workers, multiprocessing_context="fork")
    batches = iter(loader)
    next(batches)
    account.mark("workers")
    return batches


def main() -> None:
    """Runs, and answers once."""
    parser = argparse.ArgumentParser()
    job.add_arguments(parser)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--fork-at", choices=["initialize", "step1"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    model = job.make_model(options)
    facts = job.facts(options, model)
    job.warm_up(options)
    account = Account(facts["numel"], options)
    engine = job.make_engine(options, model)
    account.mark("initialize")
    train(options, account, engine)
    job.answer({**facts, "phases": account.phases})
    # Workers that wait for a consumer would keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
