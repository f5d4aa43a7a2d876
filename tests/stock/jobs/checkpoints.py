"""Saves and loads between stock and the patch. Reports how what came of it compares, on this rank.

python checkpoints.py <folder that all ranks share>
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import memory
import torch
import training
from reporting import leave, report
from training import ALL_ON, OP_OFF, Case

BEFORE, AFTER = 3, 4
CASES = {
    "stage 1": Case(stage=1, chained=True),
    "stage 2": Case(chained=True),
    "stage 3": Case(stage=3, chained=True),
    "stage 2, fp16": Case(dtype="fp16", infinite=True),
}


def main() -> None:
    folder = Path(sys.argv[1])
    rank = training.start()
    found = {name: exchange(case, folder / name.replace(", ", "_"), rank) for name, case in CASES.items()}
    if torch.distributed.get_world_size() == 1:
        found["children"] = children(folder / "large")
    report(found)
    leave()


def exchange(case: Case, folder: Path, rank: int) -> dict[str, Any]:
    """Save by stock and by the patch, with its own op and with stock's; continue each in the others."""
    whole = {}
    for name, switches in (("stock", None), ("op off", OP_OFF), ("ours", ALL_ON)):
        with training.patched(switches):
            engine = training.make_engine(case)
        training.steps(engine, case, BEFORE, rank)
        engine.save_checkpoint(str(folder / name))
        if name == "ours":
            saved = training.outcome(engine)
        training.steps(engine, case, AFTER, rank)
        whole[name] = training.outcome(engine)
        engine.destroy()
    ours_in_stock = resume(case, None, folder / "ours", rank)
    ours_in_op_off = resume(case, OP_OFF, folder / "ours", rank)
    return {
        "patched resumes its own": training.same_state(
            resume(case, ALL_ON, folder / "ours", rank), whole["ours"]
        ),
        # Stock's arithmetic on the same state.
        "stock continues ours": training.same_state(ours_in_stock, ours_in_op_off),
        "patched continues stock's": training.same_state(
            resume(case, OP_OFF, folder / "stock", rank), whole["stock"]
        ),
        "form": [form(folder / "stock"), form(folder / "ours")] if rank == 0 else [],
        "converted": rank != 0 or case.stage == 3 or converted(case, folder / "ours", saved),
        "in host buffers": _in_host_buffers(case, folder / "ours"),
    }


def resume(case: Case, switches: Any, folder: Path, rank: int) -> training.Outcome:
    """Load and train on."""
    with training.patched(switches):
        engine = training.make_engine(case)
    path, _ = engine.load_checkpoint(str(folder))
    assert path is not None
    training.steps(engine, case, AFTER, rank)
    found = training.outcome(engine)
    engine.destroy()
    return found


def form(folder: Path) -> dict[str, Any]:
    """Names of the files of a checkpoint, and keys, dtypes and shapes in them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): _form_of(torch.load(path, weights_only=False))
        if path.suffix == ".pt"
        else path.stat().st_size
        for path in files
    }


def _form_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), str(value.device), value.untyped_storage().nbytes()]
    if isinstance(value, dict):
        return {str(key): _form_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_form_of(item) for item in value]
    return type(value).__name__


def converted(case: Case, folder: Path, saved: training.Outcome) -> bool:
    """Whether stock's conversion to fp32 finds the masters; compared where this rank's begin."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    model = training.Model(case.chained)
    names = {id(param): name for name, param in model.named_parameters()}
    for group, master in zip(model.groups(), saved.masters, strict=True):
        flat = torch.cat([state[names[id(param)]].flatten() for param in group["params"]])
        count = min(flat.numel(), master.numel())
        if flat.dtype != torch.float32 or not torch.equal(flat[:count], master[:count]):
            return False
    return True


def _in_host_buffers(case: Case, folder: Path) -> bool:
    """Whether all that the optimizer holds is kept out of children after a load."""
    with training.patched(ALL_ON):
        engine = training.make_engine(case)
    engine.load_checkpoint(str(folder))
    found = all(training.stays_out_of_children(tensor) for tensor in training.held_by(engine))
    engine.destroy()
    return found


def children(folder: Path) -> dict[str, float]:
    """Growth of the tree, in bytes a parameter, in a step after a load beside forked workers."""
    layers, job = 8, {"stage": 2, "gas": 1}
    found = {}
    for name, switches in (("stock", None), ("ours", ALL_ON)):
        with training.patched(switches):
            engine = memory.make_engine(job, memory.make_model(layers))
        memory.like_a_device(engine.optimizer)
        if name == "stock":
            memory.step(engine)
            engine.save_checkpoint(str(folder))
        engine.load_checkpoint(str(folder))
        memory.step(engine)
        batches = memory.start_workers()
        before = memory.tree_nbytes()
        memory.step(engine)
        found[name] = (memory.tree_nbytes() - before) / (layers * memory.HIDDEN**2)
        del batches
        engine.destroy()
    return found


if __name__ == "__main__":
    main()
