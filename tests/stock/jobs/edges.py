"""What jobs do now and then: leave out a step, look between backward and step, load a universal checkpoint.

python edges.py <empty folder>

Reports what was found by claim.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import training
from reporting import report
from training import ALL_ON, OP_OFF, Case

from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.utils import safe_get_full_grad, safe_get_full_optimizer_state

STOCK = None


def main() -> None:
    folder = Path(sys.argv[1])
    training.start()
    report(
        {
            "left out": left_out(),
            "early": {name: early(switches) for name, switches in (("stock", STOCK), ("ours", ALL_ON))},
            "between": [between(case) for case in (Case(), Case(dtype="fp16", infinite=True))],
            "universal": universal(folder),
            "zenflow": zenflow(),
            "no compiler": no_compiler(),
        }
    )


def left_out() -> dict[str, bool]:
    """At accumulation 1, two backward passes before the first step."""
    outcomes = {}
    for name, switches, first in (("stock", STOCK, 7), ("ours", OP_OFF, 7), ("other first", OP_OFF, 8)):
        with training.patched(switches):
            engine = training.make_engine(Case())
        for micro in (first, 0):
            backward(engine, Case(), 0, micro)
        engine.step()
        outcomes[name] = training.outcome(engine)
        engine.destroy()
    return {
        "as stock": training.same_state(outcomes["ours"], outcomes["stock"]),
        "the first does not count": training.same_state(outcomes["ours"], outcomes["other first"]),
    }


def early(switches: Any) -> bool:
    """Whether what arrives of a parameter that only the first of three micro-batches uses is stepped with."""
    with training.patched(switches):
        engine = training.make_engine(Case(gas=3))
    sums = training.record(engine.optimizer)
    training.micro_step(engine, Case(gas=3), 0, 0, 0)
    for micro in (1, 2):
        training.micro_step(engine, Case(gas=3, unused_at=(0,)), 0, micro, 0)
    numel = engine.module.sometimes.weight.numel()
    start = sum(param.numel() for param in engine.module.groups()[0]["params"]) - numel
    arrived = sums[0][start : start + numel]
    gradient = engine.optimizer.single_partition_of_fp32_groups[0].grad[start : start + numel]
    found = bool(arrived.abs().max() > 0) and torch.equal(gradient, arrived)
    engine.destroy()
    return found


def between(case: Case) -> dict[str, bool]:
    """What stands between backward and step, beside what stands there in stock."""
    seen = []
    for switches in (STOCK, ALL_ON):
        with training.patched(switches):
            engine = training.make_engine(case)
        training.steps(engine, case, 3, 0)
        backward(engine, case, 3, 0)
        optimizer = engine.optimizer
        seen.append(
            {
                "gradients": [safe_get_full_grad(p) for p in engine.module.parameters() if p.requires_grad],
                "norms": dict(sorted(optimizer.norm_for_param_grads.items())),
                "overflow": optimizer.check_overflow() or optimizer.overflow,
            }
        )
        engine.step()
        engine.destroy()
    stock, ours = seen
    return {
        "gradients": all(map(close, stock["gradients"], ours["gradients"])),
        "norms": list(stock["norms"]) == list(ours["norms"])
        and all(map(close, stock["norms"].values(), ours["norms"].values())),
        "overflow": stock["overflow"] == ours["overflow"] == case.infinite,
    }


def close(stock: torch.Tensor, ours: torch.Tensor) -> bool:
    """Whether elements agree, as far as they are numbers: a norm that is none may be infinite or NaN."""
    one, other = stock.double().nan_to_num(), ours.double().nan_to_num()
    return torch.allclose(one, other, rtol=1e-6, atol=0.0) or not (stock.isfinite() | ours.isfinite()).any()


def universal(folder: Path) -> dict[str, bool]:
    """A universal checkpoint, loaded; then a look at the moments, and again after a step."""
    case = Case(chained=True)
    with training.patched(ALL_ON):
        engine = training.make_engine(case)
    training.steps(engine, case, 3, 0)
    saved = training.outcome(engine)
    looked_at = moments(engine)
    engine.save_checkpoint(str(folder), tag="plain")
    engine.destroy()
    convert = (sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state")
    paths = ("--input_folder", str(folder / "plain"), "--output_folder", str(folder / "universal"))
    subprocess.run([*convert, *paths], check=True, stdout=subprocess.DEVNULL)
    with training.patched(ALL_ON):
        loads = {**case.extra, "checkpoint": {"load_universal": True}}
        engine = training.make_engine(Case(chained=True, extra=loads))
    engine.load_checkpoint(str(folder), tag="universal")
    after = training.outcome(engine)
    found = {
        "masters": training.same_bits(saved.masters, after.masters),
        "moments": training.same_bits(saved.moments, after.moments),
        "looked at": training.same_bits(looked_at, moments(engine)),
        "in host buffers": all(training.stays_out_of_children(tensor) for tensor in training.held_by(engine)),
    }
    training.steps(engine, case, 1, 0)
    found["looked at after a step"] = training.same_bits(held(engine), moments(engine))
    engine.destroy()
    return found


def zenflow() -> list[bool]:
    """The op under the patch: ours, and for ZenFlow's workers stock's."""
    with training.patched(ALL_ON):
        op = CPUAdamBuilder().load()
    return [hasattr(op, name) for name in ("AdamQueue", "adam_update", "zenflow_adam_create")]


def no_compiler() -> dict[str, Any]:
    """Where our op does not compile, stock's steps, to stock's bits."""
    from deepspeed_lean import stage_base

    class Builder:
        def load(self) -> None:
            raise RuntimeError("g++: not found")

    stock = training.train(Case(gas=3), STOCK, 0)
    ours, stage_base.CPUAdamBuilder = stage_base.CPUAdamBuilder, Builder
    try:
        with training.patched(ALL_ON):
            optimizer = DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(1))])
        under = training.train(Case(gas=3), ALL_ON, 0)
    finally:
        stage_base.CPUAdamBuilder = ours
    return {
        "op is ours": hasattr(optimizer.ds_opt_adam, "AdamQueue"),
        "stock's bits": training.same_state(stock, under),
    }


def backward(engine: Any, case: Case, step: int, micro: int) -> None:
    """`training.micro_step` as far as backward."""
    own, engine.step = engine.step, lambda: None
    try:
        training.micro_step(engine, case, step, micro, 0)
    finally:
        engine.step = own


def moments(engine: Any) -> list[torch.Tensor]:
    """Of the first group: stock lets no parameter of a later one find its moments."""
    params = engine.module.groups()[0]["params"]
    names = training.MOMENTS
    return [safe_get_full_optimizer_state(param, name).clone() for param in params for name in names]


def held(engine: Any) -> list[torch.Tensor]:
    """The same, from the optimizer's state."""
    state = engine.optimizer.optimizer.state[training.masters_of(engine)[0]]
    parts, start = [], 0
    for param in engine.module.groups()[0]["params"]:
        end = start + param.numel()
        parts += [state[name][start:end].view_as(param) for name in training.MOMENTS]
        start = end
    return parts


if __name__ == "__main__":
    main()
