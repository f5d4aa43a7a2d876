"""On and off, engine after engine, in one process. Reports what was found by claim."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import memory
import torch
import training
from reporting import report
from training import ALL_ON, OP_OFF, Case

import deepspeed
import deepspeed_lean

CASE = Case(gas=3)  # where stock and the patch differ
CLIENT = Case(
    extra={"optimizer": {}, "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
)
LAYERS = 24  # 25 million parameters


def main() -> None:
    rank = training.start()
    report(
        {
            "on and off": on_and_off(rank),
            "two at once": two_at_once(rank),
            "client": client(rank),
            "returned": [returned(ALL_ON, with_client) for with_client in (False, True)],
            "pinned without a device": pinned(),
        }
    )


def on_and_off(rank: int) -> dict[str, bool]:
    """Engines keep what they were made with, whatever is applied and reverted meanwhile."""
    from deepspeed.runtime.zero import stage_1_and_2

    own = stage_1_and_2.DeepSpeedZeroOptimizer
    stock, ours = training.train(CASE, None, rank), training.train(CASE, ALL_ON, rank)
    other = training.train(CASE, {"accumulator": False, **OP_OFF}, rank)
    before = training.make_engine(CASE)
    training.steps(before, CASE, 2, rank)
    deepspeed_lean.apply()
    under = training.make_engine(CASE)
    training.steps(before, CASE, 4, rank)  # stock's engine while the patch is on
    training.steps(under, CASE, 5, rank)
    applied_again = deepspeed_lean.apply(accumulator=False, adam_op=False)
    again = training.make_engine(CASE)
    training.steps(again, CASE, 3, rank)
    deepspeed_lean.revert()
    after = training.make_engine(CASE)
    for engine in (before, under, again, after):
        training.steps(engine, CASE, CASE.steps - engine.global_steps, rank)
    found = {
        "different without and with": not training.same_state(stock, ours),
        "made before": training.same_state(training.outcome(before), stock),
        "made under it, trained on after": training.same_state(training.outcome(under), ours),
        "applied again with other switches": training.same_state(training.outcome(again), other)
        and applied_again == ("host_buffers", "unscale", "staging", "temporary"),
        "made after": training.same_state(training.outcome(after), stock),
        "stock's class": type(after.optimizer) is own and type(before.optimizer) is own,
        "nothing in force": deepspeed_lean.applied() == (),
    }
    for engine in (before, under, again, after):
        engine.destroy()
    return found


def two_at_once(rank: int) -> bool:
    """Two engines whose steps alternate train as each alone."""
    alone = training.train(CASE, ALL_ON, rank)
    with training.patched(ALL_ON):
        engines = [training.make_engine(CASE) for _ in range(2)]
    for _ in range(CASE.steps):
        for engine in engines:
            training.steps(engine, CASE, 1, rank)
    outcomes = [training.outcome(engine) for engine in engines]
    for engine in engines:
        engine.destroy()
    return all(training.same_state(outcome, alone) for outcome in outcomes)


def client(rank: int) -> dict[str, Any]:
    """torch's AdamW of the client's, with torch's schedule, and hooks on the optimizer's step."""
    outcomes = []
    for switches in (None, ALL_ON):
        calls = {"before": 0, "after": 0}
        with training.patched(switches), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = training.make_engine(
                CLIENT,
                optimizer=lambda groups: torch.optim.AdamW(groups, lr=training.LR, betas=training.BETAS),
                lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
            )
            _count(engine.optimizer.optimizer, calls)
            training.steps(engine, CLIENT, CLIENT.steps, rank)
        outcomes.append(
            {
                "outcome": training.outcome(engine),
                "kind": type(engine.optimizer.optimizer).__name__,
                "calls": calls,
                "rates": [group["lr"] for group in engine.optimizer.param_groups],
                "order": [str(w.message) for w in caught if "lr_scheduler.step()" in str(w.message)],
            }
        )
        engine.destroy()
    with training.patched(ALL_ON):
        engine = training.make_engine(CASE)
    calls = {"before": 0, "after": 0}
    _count(engine.optimizer.optimizer, calls)
    training.steps(engine, CASE, 2, rank)
    engine.destroy()
    same = training.same_state(*(one.pop("outcome") for one in outcomes))
    return {"same bits": same, "stock": outcomes[0], "ours": outcomes[1], "calls of stock's Adam": calls}


def _count(optimizer: torch.optim.Optimizer, calls: dict[str, int]) -> None:
    optimizer.register_step_pre_hook(lambda *_: calls.update(before=calls["before"] + 1))
    optimizer.register_step_post_hook(lambda *_: calls.update(after=calls["after"] + 1))


def returned(switches: Any, with_client: bool) -> list[float]:
    """Bytes a parameter that model and engine hold, and that are left after both are gone.

    The model goes too: stock's hooks on its modules hold the engine, destroyed or not.
    """
    gc.collect()
    before = _resident_nbytes()
    model = memory.make_model(LAYERS)
    numel = sum(param.numel() for param in model.parameters())
    with training.patched(switches):
        if with_client:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            config = training.config(CLIENT) | {"gradient_accumulation_steps": 2}
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
            del optimizer
        else:
            engine = memory.make_engine({"stage": 2, "gas": 2}, model)
    for _ in range(2 * engine.gradient_accumulation_steps()):
        memory.step(engine)
    held = _resident_nbytes() - before
    engine.destroy()
    del engine, model
    gc.collect()
    return [held / numel, (_resident_nbytes() - before) / numel]


def pinned() -> list[Any]:
    """The patch of stock's CUDA accelerator, as far as it can be looked at without a device."""
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    cpu = get_accelerator()
    own = CUDA_Accelerator._torch_pin_memory
    set_accelerator(CUDA_Accelerator())
    try:
        applied = "pinning" in deepspeed_lean.apply()
        replaced = CUDA_Accelerator._torch_pin_memory is not own
        tensor = torch.arange(3 << 20, dtype=torch.float32)
        copy = CUDA_Accelerator._torch_pin_memory(get_accelerator(), tensor)
        exact = torch.equal(copy, tensor) and training.stays_out_of_children(copy)
        deepspeed_lean.revert()
    finally:
        set_accelerator(cpu)
    return [applied, replaced, exact, CUDA_Accelerator._torch_pin_memory is own]


def _resident_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


if __name__ == "__main__":
    main()
