"""Measures what a training with forked workers costs the host, at two sizes of the model.

    python memory.py '{"stage": 2, "gas": 1, "fork_at": "initialize", "patch": true}' ...

Each measurement is a forked child of this process, so that stock is imported once. Reports, for each, bytes
of the process tree at its end and at its highest, a parameter: the slope between the sizes, in which what
does not grow with the model cancels.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import peer_job
import torch
from reporting import report

import deepspeed
import deepspeed_lean

HIDDEN = 1024
LAYERS = (20, 60)  # 21 and 63 million parameters
STEPS = 3
WORKERS = 2
SAMPLE_EVERY_S = 0.05


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * self.linear(x)


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((HIDDEN,), 1.0 + index % 7)


def main() -> None:
    peer_job.spare_stock(deepspeed)
    found = []
    for text in sys.argv[1:]:
        job = json.loads(text)
        in_child(job, 1)  # compiles what is missing: compilers are children too
        small, large = (in_child(job, layers) for layers in LAYERS)
        numel = (LAYERS[1] - LAYERS[0]) * HIDDEN**2
        found.append({name: (large[name] - small[name]) / numel for name in small})
    report(found)


def in_child(job: dict[str, Any], layers: int) -> dict[str, int]:
    """Measure in a forked child."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(send, json.dumps(measure(job, layers)).encode())
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(send)
    with open(receive) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"{job}: ended with status {status}"
    return json.loads(text)


def measure(job: dict[str, Any], layers: int) -> dict[str, int]:
    """Growth of the tree since the model was there."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    if job["patch"]:
        deepspeed_lean.apply()
    model = make_model(layers)
    Block().bfloat16()(torch.ones(4, HIDDEN).bfloat16()).float().mean().backward()
    gc.collect()
    meter = Meter()
    engine = make_engine(job, model)
    like_a_device(engine.optimizer)
    batches = None
    for step in range(STEPS):
        if batches is None and (step == 1 or job["fork_at"] == "initialize"):
            batches = start_workers()
        for _ in range(job["gas"]):
            inputs = next(batches) if batches is not None else torch.ones(4, HIDDEN)
            engine.backward(engine(inputs.bfloat16()).float().square().mean())
            engine.step()
    gc.collect()
    return meter.end()


def make_model(layers: int) -> torch.nn.Module:
    """Layers of bf16, without the time that random weights take."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*[Block() for _ in range(layers)])
    model = model.bfloat16().to_empty(device="cpu")
    for param in model.parameters():
        param.data.fill_(1e-5)
    return model


def make_engine(job: dict[str, Any], model: torch.nn.Module) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": job["gas"],
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": job["stage"],
            "reduce_bucket_size": 2_000_000,
            "allgather_bucket_size": 2_000_000,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
    }
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def step(engine: Any) -> None:
    """One micro-batch and one step."""
    engine.backward(engine(torch.ones(4, HIDDEN).bfloat16()).float().square().mean())
    engine.step()


def like_a_device(optimizer: Any) -> None:
    """Keep weights where forking duplicates nothing, as on a device: there a step's writes copy no pages."""
    for flat in getattr(optimizer, "bit16_groups_flat", ()):
        flat.share_memory_()


def start_workers() -> Any:
    loader = torch.utils.data.DataLoader(
        Data(), batch_size=4, num_workers=WORKERS, persistent_workers=True, multiprocessing_context="fork"
    )
    batches = iter(loader)
    next(batches)
    return batches


def tree_nbytes() -> int:
    """Memory of this process and all its descendants, without pages of files; shared pages by share."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    todo, total = [os.getpid()], 0
    while todo:
        pid = todo.pop()
        todo += children.get(pid, [])
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # ended meanwhile
        total += sum(int(x.split()[1]) << 10 for x in lines if x.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return total


class Meter:
    """Growth of the tree since it was made, sampled by a thread."""

    def __init__(self) -> None:
        self._base = self._peak = tree_nbytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            self._peak = max(self._peak, tree_nbytes())

    def end(self) -> dict[str, int]:
        """Growth now, and at its highest."""
        self._stop.set()
        self._thread.join()
        now = tree_nbytes()
        return {"end": now - self._base, "peak": max(self._peak, now) - self._base}


if __name__ == "__main__":
    main()
