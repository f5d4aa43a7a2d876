"""Saves, loads or converts a checkpoint in a process of its own and measures what that needs.

    python -m tests.memory.checkpoint_job save|load|convert <folder> <layers>

Prints one JSON line: for each phase, by how many bytes the process's anonymous memory rose above what it was
when the phase began, at its highest.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import threading
from pathlib import Path

import torch

import deepspeed
from tests.memory.ranks import run_ranks

HIDDEN = 2048
SAMPLE_EVERY_S = 0.002
LIMIT_S = 170


def anonymous_nbytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("RssAnon: not in /proc/self/status")


@contextlib.contextmanager
def highest(phases, name):
    """Keep in phases[name] how far anonymous memory rises inside the block."""
    gc.collect()
    before = peak = anonymous_nbytes()
    stop = threading.Event()

    def watch():
        nonlocal peak
        while not stop.wait(SAMPLE_EVERY_S):
            peak = max(peak, anonymous_nbytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        phases[name] = max(peak, anonymous_nbytes()) - before


def make_engine(layers, extra=None):
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(layers)])
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for index, param in enumerate(model.parameters()):
        param.data.fill_(0.01 * (index + 1))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
        **(extra or {}),
    }
    return deepspeed.initialize(model=model, config=config)[0]


def train_step(engine):
    for param in engine.module.parameters():
        param.grad = torch.full_like(param, 1e-3)
    loss = engine(torch.ones(1, HIDDEN, dtype=torch.bfloat16)).float().mean() * 0.0
    engine.backward(loss)
    engine.step()


def save(folder, layers, phases):
    engine = make_engine(layers)
    train_step(engine)
    with highest(phases, "save"):
        engine.save_checkpoint(folder)
    with highest(phases, "second save"):
        engine.save_checkpoint(folder, tag="second", save_latest=False)


def load(folder, layers, phases):
    engine = make_engine(layers)
    with highest(phases, "load"):
        path, _ = engine.load_checkpoint(folder)
    assert path is not None and engine.global_steps == 1


def convert(folder, layers, phases):
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    for safe in (False, True):
        with highest(phases, f"convert, safetensors {safe}"):
            convert_zero_checkpoint_to_fp32_state_dict(
                folder, Path(folder, f"fp32_{safe}"), max_shard_size="200MB", safe_serialization=safe
            )


def run_checkpoint_job(what, folder, layers, world=1):
    """Run one of the above on `world` ranks; returns each rank's phases."""
    arguments = [what, str(folder), str(layers)]
    lines = run_ranks("tests.memory.checkpoint_job", arguments, world, LIMIT_S)
    return [json.loads(line.rpartition("RESULT ")[2]) for line in lines]


def main():
    what, folder, layers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    phases = {}
    {"save": save, "load": load, "convert": convert}[what](folder, layers, phases)
    print("RESULT " + json.dumps(phases))


if __name__ == "__main__":
    main()
