"""`managed_gradient_accumulation` false: as many backwards as the script likes, and every step() steps."""

import pytest
import torch

from deepspeed.utils import safe_get_full_fp32_param
from tests.distributed.harness import run_distributed
from tests.distributed.training import rank_and_world
from tests.small_engine import CASES, ds_config, make_engine

NUMEL = 6


def _as_many_as_the_script_likes():
    rank, world = rank_and_world()
    for case in CASES:
        for accumulation in (1, 4):
            config = case.config(
                managed_gradient_accumulation=False, gradient_accumulation_steps=accumulation,
                optimizer={"type": "SGD", "params": {"lr": 1.0}},
            )  # fmt: skip
            engine = make_engine(config, NUMEL)
            expected, samples = torch.ones(NUMEL), 0
            for count in (3, 1, 2):
                for index in range(count):
                    assert not engine.is_gradient_accumulation_boundary()
                    engine.backward(engine(torch.full((NUMEL,), float(rank + index))))
                engine.step()
                assert engine.was_step_applied(), case
                # Mean over ranks of the ranks' numbers, plus the indices; each divided by the accumulation.
                total = count * (world - 1) / 2 + sum(range(count))
                expected -= total / accumulation
                samples += count * world
                master = safe_get_full_fp32_param(engine.module.parts[0])
                assert torch.equal(master, expected), (case, accumulation, count)
                assert engine.global_samples == samples
            assert (engine.global_steps, engine.micro_steps) == (3, 3)
            engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_every_step_takes_all_gradients_since_the_last_one(world):
    run_distributed(world, _as_many_as_the_script_likes)


@pytest.mark.usefixtures("world_of_one")
def test_a_boundary_by_hand_contradicts_it():
    engine = make_engine(ds_config(managed_gradient_accumulation=False))
    with pytest.raises(RuntimeError, match="set_gradient_accumulation_boundary: expected managed_gradient"):
        engine.set_gradient_accumulation_boundary(True)
