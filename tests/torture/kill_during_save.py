"""Kills a two-rank job with -9 at random moments of a save: the last whole checkpoint must load.

    python -m tests.torture.kill_during_save [--kills 100] [--seed 0] [--async-save]

Each round continues from the checkpoint that the round before left, trains, saves under a fresh tag or over
the same one, and is killed at a random moment between the call and a little after its return: both ranks, or
one of them. A fresh process of one rank then loads what is there. It must be a state that had been handed to
a save, bit for bit, and no older than the last save that returned. Prints a table of where the kills fell.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepspeed
from deepspeed.runtime.checkpoint.names import CheckpointError
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

WORLD = 2
HIDDEN, LAYERS = 509, 8  # 2 million parameters: a save takes long enough to be hit anywhere
SAME_TAG = "same"


def make_engine(async_save: bool) -> Any:
    """An engine over a model of odd sizes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
        "checkpoint": {"async_save": True} if async_save else {},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def train_step(engine: Any) -> None:
    """One step whose data depend on the step."""
    source = torch.Generator().manual_seed(engine.global_steps)
    data = torch.randn(1, HIDDEN, generator=source).bfloat16()
    engine.backward(engine(data).float().square().mean())
    engine.step()


def fingerprint(engine: Any) -> str:
    """All weights, masters and moments as one hash. Collective."""
    digest = hashlib.sha256(str(engine.global_steps).encode())
    for param in engine.module.parameters():
        for tensor in (
            param.detach(),
            safe_get_full_fp32_param(param),
            safe_get_full_optimizer_state(param, "exp_avg"),
            safe_get_full_optimizer_state(param, "exp_avg_sq"),
        ):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def join_world(rank: int, world: int, store: str) -> None:
    """Become a rank of a gloo world."""
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel("ERROR")
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), DS_CHECKPOINT_TIMEOUT_S="1"
    )
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)


def victim(rank: int, store: str, folder: str, tag: str, async_save: bool, pipe: Any) -> None:
    """Continue, train a step, save; tells when the save begins and what it is given."""
    join_world(rank, WORLD, store)
    engine = make_engine(async_save)
    engine.load_checkpoint(folder)
    train_step(engine)
    hashed = fingerprint(engine)
    dist.barrier()
    if rank == 0:
        pipe.send((engine.global_steps, hashed))
    begin = time.monotonic()
    with contextlib.suppress(CheckpointError):  # the other rank may be dead
        engine.save_checkpoint(folder, tag=None if tag == "fresh" else tag)
        if async_save:
            train_step(engine)
            engine.wait_for_checkpoint()
        if rank == 0:
            pipe.send(time.monotonic() - begin)
    time.sleep(60)


def loader(store: str, folder: str, pipe: Any) -> None:
    """Load on one rank what two have written."""
    join_world(0, 1, store)
    engine = make_engine(False)
    path, _ = engine.load_checkpoint(folder)
    pipe.send((path, engine.global_steps, fingerprint(engine)))


def run_round(folder: str, tag: str, delay_s: float, who: list[int], async_save: bool) -> tuple[Any, float]:
    """One victim; returns the step and hash that it saved, and how long that took; 0 if it did not return."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [(rank, f"{scratch}/store", folder, tag, async_save, theirs) for rank in range(WORLD)]
        ranks = [context.Process(target=victim, args=args, daemon=True) for args in arguments]
        for rank in ranks:
            rank.start()
        assert ours.poll(60), "the victim did not come to its save"
        begun = ours.recv()
        time.sleep(delay_s)
        for rank in who:
            os.kill(ranks[rank].pid or 0, signal.SIGKILL)
        save_s = ours.recv() if ours.poll(2.0 if len(who) < WORLD else 0) else 0.0
        for rank in ranks:
            rank.kill()
            rank.join()
    return begun, save_s


def load_back(folder: str) -> tuple[str | None, int, str]:
    """What a fresh process finds."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as scratch:
        process = context.Process(target=loader, args=(f"{scratch}/store", folder, theirs), daemon=True)
        process.start()
        assert ours.poll(60), "the checkpoint did not load"
        found = ours.recv()
        process.join()
    return found


def first_save(folder: str, pipe: Any) -> None:
    """The checkpoint that everything starts from; tells how long a save takes."""
    with tempfile.TemporaryDirectory() as scratch:
        join_world(0, 1, f"{scratch}/store")
        engine = make_engine(False)
        train_step(engine)
        begin = time.monotonic()
        engine.save_checkpoint(folder, tag=SAME_TAG)
        pipe.send(((engine.global_steps, fingerprint(engine)), time.monotonic() - begin))


def where_it_fell(folder: Path, returned: bool) -> str:
    """Where a kill fell, as the files of the tag tell it."""
    if returned:
        return "after the save"
    if (folder / ".commit.json").exists():
        return "while files were renamed"
    return (
        "while files were written"
        if list(folder.glob("*.tmp"))
        else "before the first or after the last file"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill jobs during saves.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--async-save", action="store_true")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    fell: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=first_save, args=(folder, theirs))
        process.start()
        last, save_s = ours.recv()
        process.join()
        for index in range(args.kills):
            tag = chance.choice([SAME_TAG, "fresh"])
            who = chance.choice([[0, 1], [0, 1], [0], [1]])
            delay_s = chance.uniform(0, 1.3 * save_s)
            begun, took_s = run_round(folder, tag, delay_s, who, args.async_save)
            save_s = took_s or max(save_s, delay_s)
            name = f"global_step{begun[0]}" if tag == "fresh" else tag
            fell[where_it_fell(Path(folder, name), took_s > 0)] += 1
            path, step, hashed = load_back(folder)
            allowed = [begun] if took_s else [last, begun]
            assert (step, hashed) in [tuple(item) for item in allowed], (
                f"round {index}: loaded step {step} from {path}, expected one of {allowed}"
            )
            last = (step, hashed)
            print(f"{index + 1}/{args.kills} tag {tag}, ranks {who}: step {step} loads", flush=True)
    print("RESULT " + json.dumps({"kills": args.kills, "fell": dict(fell)}))


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
