"""The job that is measured: residual linear blocks under ZeRO-2 with CPU offload. Runs on ours and on stock.

Residual blocks keep gradients at an ordinary size; a plain chain of layers would shrink them to denormals,
which slow every CPU kernel down and would measure that instead.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
from torch import nn

if os.environ.get("DEEPSPEED_LEAN") == "1":
    # What stock_patch's .pth file does in an environment where it is installed.
    from deepspeed_lean import autoload

    autoload.install()
import deepspeed

DTYPE = torch.bfloat16
ROWS = 4


class ResidualBlock(nn.Module):
    """A square linear layer beside an identity."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden, bias=False, dtype=DTYPE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]` to the same shape."""
        return x + 0.1 * self.linear(x)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that every worker takes."""
    parser.add_argument("--device", required=True)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--gas", type=int, required=True)
    parser.add_argument("--pin", type=int, required=True)
    parser.add_argument("--offload", type=json.loads, default={}, help="more keys of offload_optimizer, JSON")


def make_model(options: argparse.Namespace) -> nn.Module:
    """Returns whole blocks that come closest to the number of parameters asked for, on this rank's device."""
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    layers = max(1, round(options.numel / options.hidden**2))
    with torch.device(options.device):
        return nn.Sequential(*[ResidualBlock(options.hidden) for _ in range(layers)])


def make_engine(options: argparse.Namespace, model: nn.Module) -> Any:
    """Returns the engine."""
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": options.gas,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": bool(options.pin), **options.offload},
            "reduce_bucket_size": 20_000_000,
            "allgather_bucket_size": 20_000_000,
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return engine


def make_batch(options: argparse.Namespace) -> torch.Tensor:
    """Returns `[ROWS, hidden]` random numbers."""
    return torch.randn(ROWS, options.hidden, device=options.device, dtype=DTYPE)


def warm_up(options: argparse.Namespace) -> None:
    """Runs one small block, so that what torch loads for itself is there before anything is measured.

    The same for what carries tensors between several ranks.
    """
    with torch.device(options.device):
        block = ResidualBlock(64)
    loss_of(block(torch.randn(ROWS, 64, device=options.device, dtype=DTYPE))).backward()
    if int(os.environ["WORLD_SIZE"]) > 1:
        deepspeed.init_distributed()
        torch.distributed.all_reduce(torch.ones(1, device=options.device))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Returns a scalar that gives every parameter a gradient."""
    return output.float().pow(2).mean()


def synchronize(options: argparse.Namespace) -> None:
    """Waits for the device."""
    if options.device == "cuda":
        torch.cuda.synchronize()


def facts(options: argparse.Namespace, model: nn.Module) -> dict[str, Any]:
    """Returns versions, device and shape."""
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    numel = sum(param.numel() for param in model.parameters())
    return {
        "deepspeed": deepspeed.__version__,
        "torch": torch.__version__,
        "device": device,
        "numel": numel,
        "layers": len(list(model.children())),
    }


def answer(value: Any) -> None:
    """Sends a value to the process that asked."""
    print("answer " + json.dumps(value), flush=True)
