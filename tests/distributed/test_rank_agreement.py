"""What differs between ranks is said at `initialize`, by every rank in the same words, and nobody waits.

In each case the last rank is given something else.
"""

import functools

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.distributed.harness import run_distributed
from tests.small_engine import Weights, ds_config, run_micro_batch

LIMIT_S = 60.0
OFFLOAD = "zero_optimization.offload_optimizer"


def zero(stage=2, **offload):
    return {"stage": stage, "offload_optimizer": {"device": "cpu", **offload}}


def linear(*shape, frozen=False, dtype=torch.float32, buffer=3):
    model = torch.nn.Module()
    model.register_parameter("same", torch.nn.Parameter(torch.ones(5)))
    model.register_parameter("weight", torch.nn.Parameter(torch.ones(shape, dtype=dtype), not frozen))
    model.register_buffer("table", torch.ones(buffer))
    return model


def start(model=None, client=None, **keys):
    model = model if model is not None else Weights(5, 16)
    client = client(model.parameters()) if client else None
    return deepspeed.initialize(model=model, optimizer=client, config=ds_config(**keys))[0]


def sgd(**options):
    return functools.partial(torch.optim.SGD, lr=0.1, **options)


BF16 = {"dtype": "bf16", "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
ADAM_OF_CLIENT = functools.partial(torch.optim.Adam, lr=0.1)
# What all ranks are given, what the last one is given instead -> words of the error, "R" for the last rank.
CASES = {
    "accumulation": (
        {},
        {"gradient_accumulation_steps": 2},
        ["gradient_accumulation_steps: expected the same value on every rank, got 1 on ", "; 2 on rank R."],
    ),
    "clipping": ({}, {"gradient_clipping": 0.5}, ["gradient_clipping: ", "0.0 on ", "0.5 on rank R"]),
    "clipping by default": ({}, {"gradient_clipping": None}, ["gradient_clipping: ", "1.0 on rank R"]),
    "stage": ({}, {"stage": 1}, ["zero_optimization.stage: ", "2 on ", "1 on rank R"]),
    "stage 0": ({"offload": False}, {"stage": 0, "offload": False}, ["zero_optimization.stage: ", "0 on"]),
    "offload": ({}, {"offload": False}, [f"{OFFLOAD}.device: ", "'cpu' on ", "'none' on rank R."]),
    "forms": (
        BF16,
        {**BF16, "zero_optimization": zero(master_weights="bf16_residual", optimizer_states="int8")},
        [f"{OFFLOAD}.master_weights: ", "'bf16_residual' on", f"{OFFLOAD}.optimizer_states: ", "'int8' on"],
    ),
    "buckets": (
        {},
        {"zero_optimization": {**zero(), "reduce_bucket_size": 7}},
        ["zero_optimization.reduce_bucket_size: ", "7 on rank R"],
    ),
    "precision": ({}, {"dtype": "bf16"}, ["bf16.enabled: ", "True on rank R"]),
    "micro batch": (
        {},
        {"train_micro_batch_size_per_gpu": 3},
        ["train_batch_size: ", "train_micro_batch_size_per_gpu: ", "3 on rank R"],
    ),
    "learning rate": (
        {},
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.2, "weight_decay": 0.0}}},
        ["optimizer.params.lr: ", "0.1 on ", "0.2 on rank R"],
    ),
    "no optimizer": ({}, {"optimizer": None}, ["optimizer.type: ", "'AdamW' on ", "nothing on rank R"]),
    "client's optimizer": (
        {"client": sgd()},
        {"client": ADAM_OF_CLIENT},
        ["optimizer: ", "SGD on ", "Adam on rank R"],
    ),
    "option of the client's": (
        {"client": sgd()},
        {"client": sgd(momentum=0.9)},
        ["optimizer.param_groups[0].momentum: ", "0 on ", "0.9 on rank R"],
    ),
    "shape": (
        {"model": (linear, 4, 3)},
        {"model": (linear, 3, 4)},
        ["model: ", "number 1 ", "weight [4, 3] torch.float32, number 1 of group 0 on ", "weight [3, 4]"],
    ),
    "dtype": (
        {"model": (linear, 4)},
        {"model": (functools.partial(linear, dtype=torch.float64), 4)},
        ["model: ", "number 1 weight [4] torch.float32", "weight [4] torch.float64"],
    ),
    "frozen": (
        {"model": (linear, 4)},
        {"model": (functools.partial(linear, frozen=True), 4)},
        ["number 1 weight [4] torch.float32, number 1 of group 0 on ", "weight [4] torch.float32, frozen on"],
    ),
    "buffer": (
        {"model": (linear, 4)},
        {"model": (functools.partial(linear, buffer=2), 4)},
        ["number 2 table [3] torch.float32, a buffer on ", "table [2] torch.float32, a buffer on rank R"],
    ),
    "one parameter more": (
        {"model": (Weights, 5)},
        {"model": (Weights, 5, 2)},
        ["number 1 nothing on ", "parts.1 [2] torch.float32, number 1 of group 0 on rank R"],
    ),
    "every rank another": (
        {"gradient_clipping": "rank"},
        {"gradient_clipping": 9.0},
        ["gradient_clipping: ", "1.0 on rank 0; ", "9.0 on rank R"],
    ),
}
# Reports, paths and page-locking are each rank's own, and so is an object that has no plain text.
EQUAL = {
    "reports": {
        "steps_per_print": 7,
        "wall_clock_breakdown": True,
        "dump_state": True,
        "csv_monitor": {"enabled": False, "output_path": "/elsewhere"},
    },
    "page-locking": {"zero_optimization": zero(pin_memory=False)},
    "written out": {"gradient_accumulation_steps": 1, "zero_optimization": zero(master_weights="fp32")},
    "another dtype before the cast": {"model": (functools.partial(linear, dtype=torch.float64), 4)},
}


def _given(keys):
    """Engine's arguments from a case: models are made here, since each engine needs its own."""
    keys = dict(keys)
    if "model" in keys:
        make, *arguments = keys.pop("model")
        keys["model"] = make(*arguments)
    if keys.get("gradient_clipping") == "rank":
        keys["gradient_clipping"] = 1.0 + dist.get_rank()
    if "client" in keys:
        keys["zero_optimization"] = {"stage": 2}
    return keys


def _is_last():
    return dist.get_rank() == dist.get_world_size() - 1


def _errors():
    found = {}
    for name, (usual, others, _) in CASES.items():
        with pytest.raises(ValueError) as raised:
            start(**_given(others if _is_last() else usual))
        found[name] = str(raised.value)
    engine = start()
    run_micro_batch(engine, torch.ones(21))
    assert engine.was_step_applied(), "the process can go on"
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_names_what_differs_and_who_has_which_value(world):
    ranks = run_distributed(world, _errors, timeout_s=LIMIT_S)
    usual = "rank 0" if world == 2 else "ranks 0-1"
    for name, (_, _, words) in CASES.items():
        first = ranks[0][name]
        assert all(rank[name] == first for rank in ranks), name
        assert all(word.replace("R", str(world - 1)) in first for word in words), f"{name}: {first}"
        assert usual in first or name == "every rank another", first
        assert "on every rank" in first.rpartition(". ")[2], f"says what to do: {first}"
        assert len(first) < 1000, "one clear error, not a dump"


def _run_with_what_may_differ():
    for keys in EQUAL.values():
        usual = {"dtype": "bf16", "model": (linear, 4)}
        engine = start(**_given({**usual, **keys} if _is_last() else usual))
        engine.backward(engine.module.weight.sum() + engine.module.same.sum())
        engine.step()
        assert engine.was_step_applied()
        engine.destroy()


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_a_ranks_own_may_differ(world):
    run_distributed(world, _run_with_what_may_differ, timeout_s=LIMIT_S)
