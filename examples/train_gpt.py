"""Train a byte-level GPT on Python's own standard library: ZeRO-2, optimizer on the host, two CPU ranks.

    deepspeed --num_gpus 2 examples/train_gpt.py

Ends with an account of the host memory that it took, and fails if the loss did not fall below 2.8.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from pathlib import Path

# The host side is what this example shows: two CPU ranks, whatever the machine has.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from gpt import GPT, ComputeInFloat, GPTShape, Windows, has_bf16_instructions, standard_library_bytes
from memory_account import MemoryAccount, draw_phases, memory_table
from tqdm import tqdm

import deepspeed

CONFIG = json.loads(Path(__file__).with_suffix(".json").read_text())
FULL_STEPS = CONFIG["scheduler"]["params"]["total_num_steps"]
LOSS_LIMIT = 2.8
BAR = "{percentage:3.0f}% |{bar}| step {n_fmt}/{total_fmt}, {elapsed}{postfix}"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT with ZeRO-2 and CPU offload.")
    parser.add_argument("--steps", type=int, default=FULL_STEPS, help="optimizer steps")
    parser.add_argument("--picture", type=Path, default=Path("memory.png"), help="where the picture goes")
    fast = "bf16" if has_bf16_instructions() else "fp32"
    parser.add_argument("--compute", choices=["bf16", "fp32"], default=fast, help="of forward and backward")
    parser.add_argument("--local_rank", type=int, default=0, help="passed by the launcher")
    return parser.parse_args()


def warm_up(model: torch.nn.Module, windows: Windows) -> None:
    """One pass before the baseline: what torch itself loads and keeps is no growth of ours."""
    model(*windows()).backward()
    model.zero_grad(set_to_none=True)
    dist.barrier()


def train_step(engine: deepspeed.DeepSpeedEngine, windows: Windows, account: MemoryAccount) -> torch.Tensor:
    """One optimizer step; the first one marks its phases. Returns this rank's mean loss, `[]` fp64."""
    losses = []
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(*windows())
        engine.backward(loss)
        losses.append(loss.detach().double())
        if engine.global_steps == 0 and engine.is_gradient_accumulation_boundary():
            account.mark("first\nbackward", engine.memory_report())
        engine.step()
    if engine.global_steps == 1:
        account.mark("first\nstep", engine.memory_report())
    return torch.stack(losses).mean()


def train(
    engine: deepspeed.DeepSpeedEngine, windows: Windows, account: MemoryAccount, steps: int
) -> tuple[float, float]:
    """Train under a progress bar. Returns the ranks' mean loss: of the first step, and of the last ten."""
    tokens_per_step = engine.train_batch_size() * windows.context
    first, recent = 0.0, deque[float](maxlen=10)
    start = time.perf_counter()
    with tqdm(total=steps, disable=dist.get_rank() != 0, ncols=112, bar_format=BAR) as bar:
        for step in range(1, steps + 1):
            loss = train_step(engine, windows, account)
            # One message carries every rank's loss and memory.
            totals = torch.stack([loss, torch.tensor(account.growth_nbytes(), dtype=torch.float64)])
            dist.all_reduce(totals)
            recent.append(totals[0].item() / dist.get_world_size())
            first = first or recent[0]
            tokens_per_s = step * tokens_per_step / (time.perf_counter() - start)
            host = account.per_param(totals[1].item())
            state = (
                f"loss {sum(recent) / len(recent):.2f}, {tokens_per_s:,.0f} tokens/s, host {host:.1f} B/param"
            )
            bar.set_postfix_str(state, refresh=False)
            bar.update()
    account.mark(f"step\n{steps}", engine.memory_report())
    return first, sum(recent) / len(recent)


def report(account: MemoryAccount, losses: tuple[float, float], picture: Path) -> None:
    """Print what was learned and what it cost, and draw it."""
    print(f"\nLoss {losses[0]:.2f} -> {losses[1]:.2f}. ", end="")
    print(f"{account.param_numel:,} parameters on {dist.get_world_size()} ranks took:\n")
    print(memory_table(account))
    try:
        draw_phases(account, picture)
    except ImportError:
        print("\n  no picture: pip install matplotlib to have one")
    else:
        print(f"\n  picture: {picture}")


def main() -> int:
    """Train, report, and tell by the exit code whether the model has learned."""
    arguments = parse_arguments()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    shape = GPTShape()
    model: torch.nn.Module = GPT(shape).bfloat16()
    if arguments.compute == "fp32":
        model = ComputeInFloat(model)
    batch = CONFIG["train_micro_batch_size_per_gpu"]
    windows = Windows(standard_library_bytes(), batch, shape.context, seed=1 + dist.get_rank())
    warm_up(model, windows)

    account = MemoryAccount(sum(param.numel() for param in model.parameters()))
    engine, _, _, _ = deepspeed.initialize(model=model, config=CONFIG)
    account.mark("initialize", engine.memory_report())
    losses = train(engine, windows, account, arguments.steps)
    learned = losses[1] < LOSS_LIMIT or arguments.steps < FULL_STEPS
    if dist.get_rank() == 0:
        report(account, losses, arguments.picture)
        if not learned:
            print(f"loss: expected below {LOSS_LIMIT}, got {losses[1]:.3f}.", file=sys.stderr)
    engine.destroy()
    dist.destroy_process_group()
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
