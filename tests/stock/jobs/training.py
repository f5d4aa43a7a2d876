"""A small model whose gradients do not depend on its weights, trained by stock's engine, patched or not.

Since gradients are a function of the data alone, two trainings differ by their arithmetic and by nothing that
follows from it: bounds can be derived. `Case(chained=True)` is a model in which everything feeds back.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peer_job
import torch

import deepspeed
import deepspeed_lean
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ALL_ON: dict[str, bool] = {}
OP_OFF = {"adam_op": False}
BETAS = (0.9, 0.95)
LR = 1e-2
MOMENTS = ("exp_avg", "exp_avg_sq")
HIDDEN = 33
BATCH = 3


@dataclass(frozen=True)
class Case:
    """One training run."""

    stage: int = 2
    dtype: str = "bf16"
    gas: int = 1
    clip: float = 0.0
    steps: int = 10
    chained: bool = False
    # One rank's data has an infinity in the fourth step, for an element that one rank owns.
    infinite: bool = False
    unused_at: tuple[int, ...] = ()  # steps without a gradient of `sometimes`
    extra: Mapping[str, Any] = field(default_factory=dict)  # top-level keys of the configuration


class Model(torch.nn.Module):
    """Odd sizes; a frozen layer; a group so small that some ranks own nothing of it."""

    def __init__(self, chained: bool) -> None:
        super().__init__()
        self.chained = chained
        self.wide = torch.nn.Linear(HIDDEN, HIDDEN)
        self.frozen = torch.nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.narrow = torch.nn.Linear(HIDDEN, 7)
        self.sometimes = torch.nn.Linear(HIDDEN, 5, bias=False)
        self.gain = torch.nn.Parameter(torch.linspace(0.5, 1.0, 3))

    def groups(self) -> list[dict[str, Any]]:
        """Three parameter groups that are stepped differently."""
        matrices = [self.wide.weight, self.narrow.weight, self.sometimes.weight]
        return [
            {"params": matrices, "weight_decay": 0.1},
            {"params": [self.wide.bias, self.narrow.bias], "weight_decay": 0.0, "lr": LR / 4},
            {"params": [self.gain], "weight_decay": 0.3, "lr": LR * 2},
        ]

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, with_sometimes: bool, first: float
    ) -> torch.Tensor:
        """The loss; `first` is a factor of one element of `gain`, and of nothing else."""
        if self.chained:
            x = x + 0.1 * self.wide(self.frozen(x))
        factors = torch.tensor([first, 1.0, 1.0])
        parts = [self.wide(x), self.narrow(x), (self.gain * x[:, :3]).float() * factors]
        if with_sometimes:
            parts.append(self.sometimes(x))
        if self.chained:
            return sum(part.float().square().mean() for part in parts)
        return sum((part.float() * weights[:, : part.shape[1]]).sum() for part in parts)


@dataclass
class Outcome:
    """What a training run leaves on this rank."""

    masters: list[torch.Tensor]
    moments: list[torch.Tensor]
    params: list[torch.Tensor]
    norms: list[float]
    losses: list[float]
    skipped: int
    scale: float
    # Of each step that was not skipped, for each group: reduced gradients, added in fp32, without loss scale.
    gradients: list[list[torch.Tensor]]
    starts: list[torch.Tensor]
    saw_infinity: bool = False  # in what arrived here


def start() -> int:
    """Join the other ranks; returns this one's number."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    peer_job.spare_stock(deepspeed)
    return torch.distributed.get_rank()


@contextlib.contextmanager
def patched(switches: Mapping[str, bool] | None) -> Iterator[None]:
    """The patch, within a block; None for stock."""
    if switches is not None:
        deepspeed_lean.apply(**switches)
    try:
        yield
    finally:
        deepspeed_lean.revert()


def config(case: Case) -> dict[str, Any]:
    """The configuration of a case."""
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": case.gas,
        "gradient_clipping": case.clip,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": case.stage,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "reduce_bucket_size": 900,  # several buckets; `wide` is larger than one
            "allgather_bucket_size": 900,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": list(BETAS)}},
        **case.extra,
    }
    if case.dtype != "fp32":
        made[case.dtype] = {"enabled": True}
    if case.dtype == "fp16":
        made["fp16"] |= {"initial_scale_power": 8, "hysteresis": 1}
    return made


def make_engine(case: Case, **chosen: Any) -> Any:
    """A fresh engine; `chosen` goes to initialize in the place of the configuration's optimizer."""
    torch.manual_seed(0)
    model = Model(case.chained).to(DTYPES[case.dtype])
    if "optimizer" in chosen:
        chosen["optimizer"] = chosen["optimizer"](model.groups())
    else:
        chosen["model_parameters"] = model.groups()
    return deepspeed.initialize(model=model, config=config(case), **chosen)[0]


def micro_step(engine: Any, case: Case, step: int, micro: int, rank: int) -> float:
    """One micro-batch, which depends on step, micro-batch and rank alone."""
    source = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    x, weights = torch.randn(2, BATCH, HIDDEN, generator=source)
    last = rank == torch.distributed.get_world_size() - 1
    first = float("inf") if case.infinite and step == 3 and last else 1.0
    loss = engine(x.to(DTYPES[case.dtype]), weights, step not in case.unused_at, first)
    engine.backward(loss)
    engine.step()
    return loss.item()


def steps(engine: Any, case: Case, count: int, rank: int) -> list[float]:
    """Losses of some steps; goes on where the engine is."""
    first = engine.global_steps
    return [
        micro_step(engine, case, step, micro, rank)
        for step in range(first, first + count)
        for micro in range(case.gas)
    ]


def train(case: Case, switches: Mapping[str, bool] | None, rank: int) -> Outcome:
    """Make an engine, patched or stock's own, and train it."""
    with patched(switches):
        engine = make_engine(case)
    optimizer = engine.optimizer
    starts = [master.detach().clone() for master in optimizer.single_partition_of_fp32_groups]
    sums = record(optimizer)
    gradients, norms, losses, finite = [], [], [], True
    for step in range(case.steps):
        skipped, scale = engine.skipped_steps, optimizer.cur_scale if case.dtype == "fp16" else 1.0
        for flat in sums:
            flat.zero_()
        losses += [micro_step(engine, case, step, micro, rank) for micro in range(case.gas)]
        finite = finite and all(bool(flat.isfinite().all()) for flat in sums)
        if engine.skipped_steps == skipped:
            gradients.append([flat / scale for flat in sums])
        norm = engine.get_global_grad_norm()
        norms.append(float(norm) if norm is not None else 0.0)
    found = outcome(engine)
    found.norms, found.losses, found.gradients, found.starts = norms, losses, gradients, starts
    found.saw_infinity = not finite
    engine.destroy()
    return found


def masters_of(engine: Any) -> list[torch.Tensor]:
    """The fp32 masters of this rank, by group."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        return optimizer.fp32_partitioned_groups_flat
    return optimizer.single_partition_of_fp32_groups


def outcome(engine: Any) -> Outcome:
    """The state of an engine now; in stage 3 by parameter, since stock leaves the padding undefined."""
    optimizer = engine.optimizer
    params = [param.detach().clone() for param in engine.module.parameters()]
    if engine.zero_optimization_stage() == 3:
        trained = [param for param in engine.module.parameters() if param.requires_grad]
        masters = [safe_get_full_fp32_param(param) for param in trained]
        moments = [safe_get_full_optimizer_state(param, name) for param in trained for name in MOMENTS]
    else:
        masters = [master.detach().clone() for master in masters_of(engine)]
        states = [optimizer.optimizer.state[master] for master in masters_of(engine)]
        moments = [state[name].clone() for state in states for name in MOMENTS]
    scale = float(getattr(optimizer, "cur_scale", 1.0))
    return Outcome(masters, moments, params, [], [], engine.skipped_steps, scale, [], [])


def record(optimizer: Any) -> list[torch.Tensor]:
    """What arrives at the optimizer from now on, added up in fp32 beside it, a flat tensor a group."""
    masters = optimizer.single_partition_of_fp32_groups
    sums = [torch.zeros_like(master, requires_grad=False) for master in masters]
    original = optimizer.copy_grads_in_partition

    def copy_grads_in_partition(param: Any, group_idx: int | None = None) -> None:
        group, source, first, numel = optimizer.grad_position[optimizer.get_param_id(param)]
        gradient = optimizer.get_param_gradient_attribute(param).view(-1)[source : source + numel]
        sums[group][first : first + numel] += gradient.float()
        original(param, group_idx)

    optimizer.copy_grads_in_partition = copy_grads_in_partition
    return sums


def reference(case: Case, trained: Outcome) -> list[torch.Tensor]:
    """Masters as torch's AdamW leaves them, in fp32, with the gradients that arrived."""
    masters = [torch.nn.Parameter(flat.clone()) for flat in trained.starts]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in Model(False).groups()]
    groups = [{"params": [master], **chosen} for master, chosen in zip(masters, settings, strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, foreach=False)
    for gradients in trained.gradients:
        factor = 1.0
        if case.clip:
            squares = torch.tensor(sum(float(flat.double().square().sum()) for flat in gradients))
            torch.distributed.all_reduce(squares)
            factor = min(1.0, case.clip / (float(squares) ** 0.5 + 1e-6))
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient * factor
        optimizer.step()
    return [master.detach() for master in masters]


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Largest difference of two lists of tensors."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a.numel()]
    return max((float((a.double() - b.double()).abs().max()) for a, b in pairs), default=0.0)


def same_state(one: Outcome, other: Outcome) -> bool:
    """Whether masters, moments and parameters have the same bits."""
    names = ("masters", "moments", "params")
    return all(same_bits(getattr(one, name), getattr(other, name)) for name in names)


def held_by(engine: Any) -> list[torch.Tensor]:
    """Masters, gradients and moments."""
    masters = masters_of(engine)
    states = [engine.optimizer.optimizer.state[master] for master in masters]
    moments = [state[name] for state in states for name in MOMENTS]
    return [*masters, *(master.grad for master in masters if master.grad is not None), *moments]


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def stays_out_of_children(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is kept out of forked children, as host buffers are."""
    address = tensor.data_ptr()
    inside = False
    for line in Path(f"/proc/{os.getpid()}/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head:
            first, last = (int(part, 16) for part in head.split("-"))
            inside = first <= address < last
        elif inside and line.startswith("VmFlags:"):
            return "dc" in line.split()
    raise ValueError(f"{address}: expected the address of a mapping")
