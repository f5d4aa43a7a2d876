"""Tiny trainings for the parity tests: models whose gradients are exact, the engine's state to compare.

`ExactModel` is linear in its parameters and its data are small integers, so every product, sum over samples,
ranks and micro-batches and every division is exact in fp32, bf16 and fp16, in any order. What remains is the
optimizer's own arithmetic on equal gradients: runs that differ only in stage, world, accumulation or buckets
must agree in every bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

# Divisible by world * accumulation for worlds 1, 2, 3 and accumulation 1, 4.
SAMPLES = 24
STEPS = 10
SHAPES = {"weight": (5, 3), "odd": (7,), "scalar": (), "cube": (2, 2, 2), "single": (1,), "wide": (3, 11)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setup:
    """One way to train; the defaults are the plainest."""

    stage: int = 0
    offload: bool = False
    accumulation: int = 1
    bucket_numel: int = 1 << 20
    overlap: bool = True
    dtype: str = "fp32"
    clipping: float = 0.0
    optimizer: dict[str, Any] | None = field(
        default_factory=lambda: {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    )
    extra: dict[str, Any] = field(default_factory=dict)  # merged into the configuration's top level
    zero: dict[str, Any] = field(default_factory=dict)  # merged into zero_optimization

    def config(self) -> dict[str, Any]:
        """The DeepSpeed configuration."""
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": self.bucket_numel,
            "overlap_comm": self.overlap,
            **self.zero,
        }
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "zero_optimization": zero,
            **self.extra,
        }
        if self.optimizer is not None:
            config["optimizer"] = self.optimizer
        if self.dtype != "fp32":
            config[self.dtype] = {"enabled": True}
        if self.dtype == "fp16":
            config["fp16"]["loss_scale"] = 8  # a power of two: exact
        return config

    def but(self, **changes: Any) -> Setup:
        """The same with some settings changed."""
        return replace(self, **changes)


class ExactModel(torch.nn.Module):
    """One parameter of each shape; the output is the sum of each parameter times its share of the sample."""

    def __init__(self, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, shape in (shapes or SHAPES).items():
            # Away from zero, so that a unit in the last place keeps its meaning through ten steps.
            values = 1.0 + torch.rand(shape, generator=generator)
            self.register_parameter(name, torch.nn.Parameter(values))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The weighted sum over all rows. Args: rows: [n, total numel], small integers."""
        flat = torch.cat([param.reshape(-1) for param in self.parameters()])
        return (flat * rows.to(flat).sum(0)).sum()


def exact_rows(step: int, numel: int) -> torch.Tensor:
    """The step's samples, `[SAMPLES, numel]`: integers from -3 to 3."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(-3, 4, (SAMPLES, numel), generator=generator).float()


def exact_grad(step: int, numel: int) -> torch.Tensor:
    """What every run's gradient of a step must be, `[numel]`: an eighth of the sum over samples."""
    return exact_rows(step, numel).sum(0) / 8


def total_numel(model: torch.nn.Module) -> int:
    """Elements of all parameters together."""
    return sum(param.numel() for param in model.parameters())


def start(model: torch.nn.Module, setup: Setup, **kwargs: Any) -> deepspeed.DeepSpeedEngine:
    """An engine; its optimizer is `engine.optimizer`."""
    return deepspeed.initialize(model=model, config=setup.config(), **kwargs)[0]


def train_exact(engine: deepspeed.DeepSpeedEngine, steps: int = STEPS, first: int = 0) -> None:
    """Train an `ExactModel`, each rank on its part of the samples."""
    rank, world = rank_and_world()
    accumulation = engine.gradient_accumulation_steps()
    numel = total_numel(engine.module)
    for step in range(first, first + steps):
        parts = exact_rows(step, numel).chunk(world * accumulation)
        for part in parts[rank * accumulation : (rank + 1) * accumulation]:
            # The mean over ranks and micro-batches divides by their number: multiplied here, for an exact
            # eighth.
            engine.backward(engine(part) * (world * accumulation / 8))
            engine.step()


def rank_and_world() -> tuple[int, int]:
    """This rank and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def state_of(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Weights, masters and moments of every trainable parameter, whole, by name, on the CPU. Collective."""
    state = {}
    for name, param in engine.module.named_parameters():
        state[f"{name}.param"] = param.detach().clone()
        if not param.requires_grad or not param.numel():
            continue
        state[f"{name}.master"] = safe_get_full_fp32_param(param)
        for key in ("exp_avg", "exp_avg_sq"):
            value = safe_get_full_optimizer_state(param, key)
            if value is not None:
                state[f"{name}.{key}"] = value
    return {name: tensor.cpu() for name, tensor in state.items()}


def assert_same_bits(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], label: Any = ""
) -> None:
    """Every tensor equal in every element."""
    assert actual.keys() == expected.keys(), label
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), (
            f"{label}: {name} differs by {(tensor - expected[name]).abs().max().item():g}"
        )


def assert_close(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float, label: Any = ""
) -> None:
    """Every tensor within `relative` of the largest element of its own."""
    assert actual.keys() == expected.keys(), label
    for name, tensor in actual.items():
        if not tensor.numel():
            continue
        difference = (tensor.double() - expected[name].double()).abs().max().item()
        bound = relative * max(expected[name].double().abs().max().item(), 1e-30)
        assert difference <= bound, f"{label}: {name} differs by {difference:g}, allowed {bound:g}"
