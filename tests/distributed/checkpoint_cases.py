"""What the checkpoint tests share: jobs, and the whole state of an engine in comparable form."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.compat.peer_job import Job, make_engine, train

# Every stage with and without offload, every type, every kind of optimizer state: none, flat, with and
# without steps, whole numbers and tensors.
JOBS = {
    "stage 2 offload bf16": Job(),
    "stage 1 offload fp16": Job(stage=1, dtype="fp16"),
    "stage 2 offload fp32": Job(dtype="fp32"),
    "stage 1 device bf16": Job(stage=1, offload=False),
    "stage 2 device fp16": Job(offload=False, dtype="fp16"),
    "stage 0 bf16": Job(stage=0, offload=False),
    "stage 0 fp32": Job(stage=0, offload=False, dtype="fp32"),
    "stage 0 fp16": Job(stage=0, offload=False, dtype="fp16"),
    "accumulation 2": Job(accumulation=2),
    "overflows": Job(dtype="fp16", fp16={"initial_scale_power": 30, "loss_scale_window": 2}),
    "SGD with momentum": Job(optimizer="SGD"),
    "Lion": Job(optimizer="Lion"),
    "Adagrad": Job(optimizer="Adagrad"),
    "client's SGD": Job(optimizer="client_sgd"),
    "client's AdamW": Job(optimizer="client_adamw"),
    "client's AdamW on the device": Job(optimizer="client_adamw", offload=False),
}


def another_engine(job: Job) -> Any:
    """An engine of the same job whose weights differ until something is loaded."""
    import dataclasses

    import deepspeed

    return make_engine(dataclasses.replace(job, seed=1), deepspeed)


def snapshot(engine: Any) -> dict[str, Any]:
    """All that training depends on, by name. Collective."""
    state: dict[str, Any] = {name: value.clone() for name, value in engine.module.state_dict().items()}
    for name, param in engine.module.named_parameters():
        if param.requires_grad and param.numel():
            state[f"{name}.master"] = safe_get_full_fp32_param(param)
            for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                state[f"{name}.{key}"] = safe_get_full_optimizer_state(param, key)
    inner = engine.optimizer.optimizer
    state["steps"] = [_step(inner.state.get(group["params"][0], {})) for group in inner.param_groups]
    state["options"] = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
    state["counters"] = [engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps]
    state["scaler"] = engine.optimizer.loss_scaler.state_dict()
    state["schedule"] = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None
    return state


def differences(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names under which two snapshots differ in a bit."""
    names = [
        name for name in actual.keys() | expected.keys() if not _same(actual.get(name), expected.get(name))
    ]
    return sorted(names)


def assert_same(actual: dict[str, Any], expected: dict[str, Any], label: str = "") -> None:
    """Two snapshots agree in every bit."""
    wrong = differences(actual, expected)
    assert not wrong, f"{label}: " + "; ".join(f"{n}: {actual.get(n)} != {expected.get(n)}" for n in wrong)


def trained(job: Job, steps: int, rank: int) -> Any:
    """An engine after some steps."""
    import deepspeed

    engine = make_engine(job, deepspeed)
    train(engine, steps, rank)
    return engine


def _step(state: dict[str, Any]) -> Any:
    step = state.get("step")
    return step.clone() if isinstance(step, torch.Tensor) else step


def _same(actual: Any, expected: Any) -> bool:
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        return actual.dtype == expected.dtype and torch.equal(actual, expected)
    if isinstance(actual, list) and isinstance(expected, list):
        return len(actual) == len(expected) and all(map(_same, actual, expected))
    if isinstance(actual, torch.Tensor) or isinstance(expected, torch.Tensor):
        return False
    return actual == expected
