"""Trains every case with stock, with stock's own op under the patch, and with all of the patch.

Reports, for each case, how they compare on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import training
from reporting import leave, report
from training import ALL_ON, OP_OFF, Case, Outcome

import deepspeed_lean
from deepspeed_lean import tiled_step

# Several tiles in the largest parameter, and a multiple of what stock's op takes at a time: its last elements
# are computed otherwise than the rest.
tiled_step.TILE_NUMEL = 256

CASES = {
    f"stage {stage}, gas {gas}, {dtype}{', clipped' if clip else ''}": Case(stage, dtype, gas, clip)
    for stage, gas, dtype, clip in (
        (1, 1, "bf16", 0.0),
        (2, 1, "bf16", 0.0),
        (1, 3, "bf16", 0.0),
        (2, 3, "bf16", 0.0),
        (2, 1, "bf16", 2.0),
        (2, 3, "fp32", 0.0),
    )
} | {
    "chained": Case(chained=True),
    "fp16 with an infinity": Case(dtype="fp16", infinite=True),
    "fp16, gas 3, with an infinity": Case(dtype="fp16", gas=3, infinite=True),
}


def main() -> None:
    rank = training.start()
    found: dict[str, Any] = {name: compare(case, rank) for name, case in CASES.items()}
    found["unused"] = unused(rank)
    found["stage 3"] = stage_3(rank)
    if torch.distributed.get_world_size() == 1:
        found["switches"] = {name: switched_off(name, rank) for name in ("nothing", *deepspeed_lean.SWITCHES)}
    report(found)
    leave()


def compare(case: Case, rank: int) -> dict[str, Any]:
    """How three trainings differ, and each from torch's AdamW in fp32."""
    stock, same_op, ours = (training.train(case, switches, rank) for switches in (None, OP_OFF, ALL_ON))
    found = {
        "op off has stock's bits": training.same_state(stock, same_op),
        "the same arrives": all(
            training.same_bits(a, b) for a, b in zip(stock.gradients, ours.gradients, strict=True)
        ),
        "norms": [stock.norms, ours.norms],
        "skipped": [stock.skipped, same_op.skipped, ours.skipped],
        "saw infinity": ours.saw_infinity,
        "scale": [stock.scale, same_op.scale, ours.scale],
        "weights are rounded masters": _rounded(case, ours),
        "bound": bound(case, ours),
        "ours to stock": training.distance(ours.masters, stock.masters),
        "empty": [bool(flat.abs().max() == 0) for flat in stock.starts],
    }
    if not case.chained:
        found["stock to torch"] = training.distance(stock.masters, training.reference(case, stock))
        found["ours to torch"] = training.distance(ours.masters, training.reference(case, ours))
    return found


def bound(case: Case, ours: Outcome) -> float:
    """How far two masters may be apart that were stepped by the same formula in different order.

    In one step each implementation rounds the master twice (decay, subtraction): 2 half-ulps of it. Its
    update has at most 12 roundings, and is at most 3.6 learning rates: |m| is at most the largest gradient so
    far, and with beta2 0.95 and 10 steps sqrt(v) is at least that over 3.6. Two implementations: twice that.
    """
    half_ulp = 2.0**-24
    largest = max(float(flat.abs().max()) for flat in (*ours.masters, *ours.starts) if flat.numel())
    lr = max(float(group.get("lr", training.LR)) for group in training.Model(False).groups())
    return case.steps * 2 * half_ulp * (2 * largest + 12 * 3.6 * lr)


def unused(rank: int) -> dict[str, float]:
    """A parameter without a gradient in two steps of ten: distance from torch with zeros there."""
    case = Case(unused_at=(4, 5))
    stock, ours = training.train(case, None, rank), training.train(case, ALL_ON, rank)
    # What arrived in a step without it are zeros; stock's master gradient keeps what the step before left.
    return {
        "bound": bound(case, ours),
        "ours": training.distance(ours.masters, training.reference(case, ours)),
        "stock": training.distance(stock.masters, training.reference(case, stock)),
    }


def stage_3(rank: int) -> dict[str, Any]:
    """Stage 3, of which host buffers and op are replaced: to stock's bits with stock's op."""
    case, outcomes, held = Case(stage=3, gas=3), [], []
    for switches in (None, OP_OFF, ALL_ON):
        with training.patched(switches):
            engine = training.make_engine(case)
        training.steps(engine, case, case.steps, rank)
        outcomes.append(training.outcome(engine))
        held = training.held_by(engine)
        engine.destroy()
    stock, same_op, ours = outcomes
    return {
        "op off has stock's bits": training.same_state(stock, same_op),
        "ours to stock": training.distance(ours.masters, stock.masters),
        "bound": bound(case, ours),
        "in host buffers": all(training.stays_out_of_children(tensor) for tensor in held),
        "has masters": sum(master.numel() for master in ours.masters),
    }


def switched_off(name: str, rank: int) -> dict[str, Any]:
    """What an engine has when one switch is off, after training, and how its masters compare."""
    off = {} if name == "nothing" else {name: False}
    case = Case(gas=3, clip=2.0)
    with training.patched(off):
        applied = deepspeed_lean.applied()
        engine = training.make_engine(case)
    optimizer = engine.optimizer
    sums = training.record(optimizer)
    for step in range(case.steps):
        for flat in sums:
            flat.zero_()
        for micro in range(case.gas):
            training.micro_step(engine, case, step, micro, rank)
    masters = optimizer.single_partition_of_fp32_groups
    held = training.held_by(engine)
    found = {
        "applied": applied,
        "in host buffers": [training.stays_out_of_children(tensor) for tensor in held],
        "op is ours": hasattr(optimizer.optimizer.ds_opt_adam, "AdamQueue"),
        "gradient keeps its scale": training.same_bits([m.grad for m in masters], sums),
        "staging": [copy.numel() for copy in optimizer.param_buffer_of_bit16_for_cpu_offload_groups],
        "second accumulator": len(optimizer.accumulated_grads_in_cpu),
        "temporary": hasattr(optimizer, "temp_grad_buffer_for_cpu_offload"),
    }
    after = training.outcome(engine)
    engine.destroy()
    stock, ours = training.train(case, None, rank), training.train(case, ALL_ON, rank)
    found["to stock"] = training.distance(after.masters, stock.masters)
    found["to ours"] = training.distance(after.masters, ours.masters)
    found["bound"] = bound(case, ours)
    return found


def _rounded(case: Case, ours: Outcome) -> bool:
    """Whether the trainable weights are what all ranks' masters round to."""
    dtype = training.DTYPES[case.dtype]
    model = training.Model(case.chained).to(dtype)
    for param, value in zip(model.parameters(), ours.params, strict=True):
        param.data = value
    for group, master in zip(model.groups(), ours.masters, strict=True):
        parts = [torch.empty_like(master) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, master)
        weights = torch.cat([param.detach().flatten() for param in group["params"]])
        if not torch.equal(torch.cat(parts)[: weights.numel()].to(dtype), weights):
            return False
    return True


if __name__ == "__main__":
    main()
