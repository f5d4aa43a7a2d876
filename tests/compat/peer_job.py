"""Trains a small model under whichever `deepspeed` is importable: stock's or ours.

    python peer_job.py '{"world": 2, "jobs": [{...}, ...]}'

Prints one JSON line: for each job, what each rank returned. A job may load a checkpoint first, trains some
steps, may save, and trains on. Batches depend on the engine's step counter, so a resumed run sees what an
uninterrupted one sees.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Job:
    """One training run."""

    stage: int = 2
    dtype: str = "bf16"
    offload: bool = True
    accumulation: int = 1
    optimizer: str = "AdamW"  # of the configuration, or "client_sgd", "client_adamw"
    schedule: bool = True
    load: str | None = None
    load_args: dict[str, Any] = field(default_factory=dict)
    tag: str | None = None
    steps: int = 0
    save: str | None = None
    more: int = 0
    fp16: dict[str, Any] = field(default_factory=dict)
    seed: int = 0  # of the weights before anything is loaded


class Norm(torch.nn.Module):
    """Has buffers of two dtypes, one of them not saved."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(numel))
        self.bias = torch.nn.Parameter(torch.zeros(numel))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x * self.weight + self.bias


class Model(torch.nn.Module):
    """Tied, frozen and unused parameters, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.inner = torch.nn.Linear(3, 7)
        self.frozen = torch.nn.Linear(7, 7).requires_grad_(False)
        self.norm = Norm(7)
        self.outer = torch.nn.Linear(7, 3, bias=False)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.unused = torch.nn.Parameter(torch.zeros(3))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.frozen(self.inner(self.embed(tokens))))
        logits = self.head(self.outer(torch.relu(hidden)))
        return torch.nn.functional.cross_entropy(logits.float(), targets)


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    trainable = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trainable if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trainable if param.dim() <= 1], "weight_decay": 0.0},
    ]


def config(job: Job) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": job.accumulation,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": job.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if job.offload:
        made["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if job.dtype != "fp32":
        made[job.dtype] = {"enabled": True}
    if job.dtype == "fp16":
        made["fp16"] |= {"initial_scale_power": 10, "hysteresis": 1, **job.fp16}
    if not job.optimizer.startswith("client"):
        params = {"lr": 0.01, "momentum": 0.9} if job.optimizer == "SGD" else {"lr": 0.01}
        made["optimizer"] = {"type": job.optimizer, "params": params}
        if job.schedule:
            made["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 0.02}}
    return made


def make_engine(job: Job, deepspeed: Any) -> Any:
    torch.manual_seed(job.seed)
    model = Model()
    chosen: dict[str, Any] = {"model_parameters": groups(model)}
    if job.optimizer == "client_sgd":
        chosen = {"optimizer": torch.optim.SGD(groups(model), lr=0.01, momentum=0.9)}
    elif job.optimizer == "client_adamw":
        chosen = {"optimizer": torch.optim.AdamW(groups(model), lr=0.01)}
    return deepspeed.initialize(model=model, config=config(job), **chosen)[0]


def train(engine: Any, steps: int, rank: int) -> list[float]:
    losses = []
    for _ in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            source = torch.Generator().manual_seed(1000 * engine.global_steps + 10 * micro + rank)
            tokens, targets = torch.randint(0, 5, (2, 6), generator=source)
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
    return losses


def run(job: Job, rank: int, deepspeed: Any) -> dict[str, Any]:
    engine = make_engine(job, deepspeed)
    result: dict[str, Any] = {}
    if job.load:
        path, client = engine.load_checkpoint(job.load, tag=job.tag, **job.load_args)
        result |= {
            "path": path,
            "client": None if client is None else {k: repr(v) for k, v in sorted(client.items())},
        }
    result["losses"] = train(engine, job.steps, rank)
    if job.save:
        engine.save_checkpoint(job.save, tag=job.tag, client_state={"epoch": 3, "tensor": torch.arange(3)})
    result["more"] = train(engine, job.more, rank)
    result["weights"] = {
        name: value.double().flatten().tolist() for name, value in engine.module.state_dict().items()
    }
    result["lr"] = [group["lr"] for group in engine.optimizer.param_groups]
    result["counters"] = [
        engine.global_steps,
        engine.global_samples,
        engine.micro_steps,
        engine.skipped_steps,
    ]
    result["scale"] = float(engine.optimizer.cur_scale) if job.dtype == "fp16" else 1.0
    return result


def spare_stock(deepspeed: Any) -> None:
    """Leave out what stock does or asks for every engine and a job's results do not depend on."""
    # Compiles one more op, for inference, which leaves its buffer of 66 MB in /dev/shm.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Takes fp16 only from a processor with instructions for it; torch computes it on any.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    with contextlib.suppress(ImportError):  # ours has no use for it
        import cpuinfo

        # A second or more each time, although the processor stays what it is.
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def rank_main(rank: int, world: int, store: str, jobs: list[dict[str, Any]], out: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    import deepspeed

    spare_stock(deepspeed)
    results: list[Any] = []
    for job in jobs:
        try:
            results.append(run(Job(**job), rank, deepspeed))
        except Exception:
            results.append({"error": traceback.format_exc()})
    with open(f"{out}.{rank}", "w") as file:
        json.dump(results, file)
    torch.distributed.barrier()


def main() -> None:
    task = json.loads(sys.argv[1])
    world = task["world"]
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out"
        torch.multiprocessing.spawn(
            rank_main, args=(world, f"{folder}/store", task["jobs"], out), nprocs=world, join=True
        )
        ranks = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(world)]
    print("RESULT " + json.dumps(list(zip(*ranks, strict=True))))


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29513")
    main()
