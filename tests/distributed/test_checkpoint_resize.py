"""A checkpoint loads on any number of ranks, at stage 1 or 2, with or without offload, without a conversion.

The model's gradients are exact whatever the order of sums (see `training`), so a run that changes its number
of ranks on the way must end in the same bits as one that does not.
"""

from pathlib import Path

import pytest
import torch

import deepspeed
from deepspeed.runtime.checkpoint.torch_read import read_torch_file
from tests.distributed.harness import run_distributed
from tests.distributed.training import Setup, assert_same_bits, exact_rows, state_of

# Odd sizes; group 1 is smaller than a world of 3 shards of 2 elements.
SHAPES = {"weight": (5, 3), "odd": (7,), "cube": (2, 2, 2), "wide": (3, 11), "scalar": (), "single": (1,)}
FIRST_GROUP = ("weight", "odd", "wide")
# torch's plain AdamW rounds like the host kernel, operation by operation: places do not show in the bits.
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
HOST_ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
PLACES = {
    "stage 1": Setup(stage=1, dtype="bf16", optimizer=ADAMW),
    "stage 2": Setup(stage=2, dtype="bf16", optimizer=ADAMW),
    "stage 1 offload": Setup(stage=1, dtype="bf16", offload=True, optimizer=HOST_ADAMW),
    "stage 2 offload": Setup(stage=2, dtype="bf16", offload=True, optimizer=HOST_ADAMW),
    "stage 0": Setup(stage=0, dtype="bf16", optimizer=ADAMW),
}


class Model(torch.nn.Module):
    """Linear in its parameters, one of which is frozen; another is empty."""

    def __init__(self, seed):
        super().__init__()
        source = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(1.0 + torch.rand(shape, generator=source)))
        self.frozen = torch.nn.Parameter(torch.rand(4, generator=source), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))

    def forward(self, row):
        flat = torch.cat([param.reshape(-1) for param in self.parameters()])
        return (flat * row.to(flat)).sum()


def _engine(place, seed=7):
    model = Model(seed)
    named = dict(model.named_parameters())
    first = [named[name] for name in FIRST_GROUP]
    rest = [param for name, param in named.items() if name not in FIRST_GROUP]
    groups = [{"params": first, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 2e-2}]
    return deepspeed.initialize(model=model, config=PLACES[place].config(), model_parameters=groups)[0]


def _train(engine, steps):
    for step in range(engine.global_steps, engine.global_steps + steps):
        numel = sum(param.numel() for param in engine.module.parameters())
        # The same integers on every rank: their mean is exact on any number of ranks.
        engine.backward(engine(exact_rows(step, numel)[0]))
        engine.step()


def _leg(place, source, target, steps):
    """Load, train, save: one leg of a journey; returns the state before and after training."""
    engine = _engine(place, seed=8 if source else 7)
    if source:
        engine.load_checkpoint(source)
    loaded = state_of(engine)
    _train(engine, steps)
    engine.save_checkpoint(target)
    return loaded, state_of(engine)


JOURNEYS = [
    [(1, "stage 2 offload"), (2, "stage 2 offload"), (3, "stage 2 offload"), (1, "stage 2 offload")],
    [(1, "stage 2"), (2, "stage 1"), (3, "stage 2 offload"), (2, "stage 1 offload"), (1, "stage 2")],
    [(3, "stage 1"), (1, "stage 2 offload"), (2, "stage 0"), (3, "stage 2"), (1, "stage 1 offload")],
]


@pytest.mark.parametrize("journey", JOURNEYS, ids=["ranks", "ranks and places", "through stage 0"])
def test_a_run_that_changes_ranks_and_places_ends_in_the_uninterrupted_runs_bits(journey, tmp_path):
    steps = 2
    source, after = None, None
    for index, (world, place) in enumerate(journey):
        target = str(tmp_path / str(index))
        results = run_distributed(world, _leg, place, source, target, steps)
        for loaded, _ in results if source else ():
            assert_same_bits(loaded, after, f"leg {index}: what was loaded")
        source, after = target, results[0][1]
    straight = run_distributed(
        1, _leg, "stage 2 offload", None, str(tmp_path / "straight"), steps * len(journey)
    )
    assert_same_bits(after, straight[0][1], "after the journey")


def save_one(folder):
    """Save on this world what a world of another size loads."""
    world = torch.distributed.get_world_size()
    engine = _engine("stage 2 offload")
    _train(engine, 2)
    own = state_of(engine)
    engine.save_checkpoint(Path(folder, str(world)))
    return own


def load_all(folder, worlds):
    states = []
    for world in worlds:
        engine = _engine("stage 1", seed=8)
        engine.load_checkpoint(Path(folder, str(world)))
        states.append(state_of(engine))
    return states


def test_every_number_of_ranks_loads_what_every_other_saved(tmp_path):
    worlds = (1, 2, 3)
    saved = {world: run_distributed(world, save_one, str(tmp_path))[0] for world in worlds}
    for world in worlds:
        for states in run_distributed(world, load_all, str(tmp_path), worlds):
            for source, state in zip(worlds, states, strict=True):
                assert_same_bits(state, saved[source], f"{source} -> {world}")


def test_padding_in_the_file_is_where_stock_has_it(tmp_path):
    """Masters without padding, moments with it: the last shards of 64 and 10 elements on 3 ranks."""
    run_distributed(3, save_one, str(tmp_path))
    files = sorted((tmp_path / "3" / "global_step2").glob("*optim_states.pt"))
    contents = [read_torch_file(path)["optimizer_state_dict"] for path in files]
    masters = [[m.numel() for m in c["single_partition_of_fp32_groups"]] for c in contents]
    moments = [
        [c["base_optimizer_state"]["state"][group]["exp_avg"].numel() for group in (0, 1)] for c in contents
    ]
    assert masters == [[20, 4], [20, 4], [15, 2]]
    assert moments == [[20, 4]] * 3
    assert [c["group_paddings"] for c in contents] == [[0, 0], [0, 0], [5, 2]]
