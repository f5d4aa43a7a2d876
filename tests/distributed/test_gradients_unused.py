"""Parameters that see no gradient: in one step, in none, on one rank; and losses that reach no parameter."""

import itertools

import pytest
import torch

from tests.distributed.harness import run_distributed
from tests.distributed.training import Setup, assert_same_bits, rank_and_world, start, state_of

PLACES = [(0, False), (1, False), (2, False), (1, True), (2, True)]
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}
ADAMW = {"type": "AdamW", "params": {**SETTINGS, "torch_adam": True}}
CPU_ADAMW = {"type": "AdamW", "params": SETTINGS}


class _Parts(torch.nn.Module):
    """Three parameters; the gradient of each used one is the step's row."""

    def __init__(self):
        super().__init__()
        for name, numel in (("always", 5), ("sometimes", 7), ("never", 4), ("last", 3)):
            self.register_parameter(name, torch.nn.Parameter(torch.linspace(1, 2, numel)))

    def forward(self, step, used):
        params = [(name, param) for name, param in self.named_parameters() if name in used]
        return sum((param * _row(step, param.numel()).to(param.dtype)).sum() for _, param in params)


def _row(step, numel):
    return torch.arange(1.0, numel + 1) * (step + 1) / 8


def _used(step, rank, world):
    """`sometimes` is used in every second step, and then only by the last rank."""
    return {"always", "last"} | ({"sometimes"} if step % 2 == 0 and rank == world - 1 else set())


def _reference(world):
    """torch's AdamW, where no gradient means a gradient of zero."""
    model = _Parts()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **SETTINGS)
    for step in range(4):
        for name, param in model.named_parameters():
            users = sum(name in _used(step, rank, world) for rank in range(world))
            param.grad = _row(step, param.numel()) * users / world
        optimizer.step()
    state = {}
    for name, param in model.named_parameters():
        state[f"{name}.param"] = state[f"{name}.master"] = param.detach().clone()
        state |= {f"{name}.{key}": optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq")}
    return state


def _train_partly_used(setups):
    rank, world = rank_and_world()
    results = []
    for setup in setups:
        engine = start(_Parts(), setup)
        for step in range(4):
            engine.backward(engine(step, _used(step, rank, world)))
            engine.step()
        results.append(state_of(engine))
        engine.destroy()
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_a_parameter_without_gradient_counts_as_zero_and_its_moments_decay(world):
    setups = [
        Setup(*place, bucket_numel=bucket, optimizer=CPU_ADAMW if place[1] else ADAMW)
        for place, bucket in itertools.product(PLACES, (1, 1000))
    ]
    expected = _reference(world)
    for results in run_distributed(world, _train_partly_used, setups):
        for setup, state in zip(setups, results, strict=True):
            # Same operations in the same order as torch's, on gradients that are exact.
            assert_same_bits(state, expected, setup)


def _raise_for_unused(place):
    rank, world = rank_and_world()
    strict = Setup(*place, zero={"ignore_unused_parameters": False}, optimizer=CPU_ADAMW)
    engine = start(_Parts(), strict)
    key = r"zero_optimization.ignore_unused_parameters: expected a gradient for every parameter"
    engine.backward(engine(0, {"always", "sometimes", "last"}))
    with pytest.raises(RuntimeError, match=rf"{key} because it is false, got none for \['never'\]"):
        engine.step()
    engine.destroy()
    # Unused on one rank only: every rank raises, and none waits for another.
    everything = {"always", "sometimes", "last", "never"}
    engine = start(_Parts(), strict)
    engine.backward(engine(0, everything if rank else everything - {"never"}))
    with pytest.raises(RuntimeError, match=key):
        engine.step()
    engine.destroy()
    # All used, over several passes: a step.
    engine = start(_Parts(), strict)
    engine.backward(engine(0, {"always", "sometimes"}))
    engine.backward(engine(0, {"last", "never"}))
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_an_unused_parameter_is_named_on_every_rank_when_it_may_not_be_ignored(place, world):
    run_distributed(world, _raise_for_unused, place)


def _losses_that_reach_nothing(place):
    engine = start(_Parts(), Setup(*place, optimizer=CPU_ADAMW))
    with pytest.raises(RuntimeError, match="backward: expected a loss that depends on parameters"):
        engine.backward(engine(0, {"always"}).detach())
    with (
        pytest.raises(RuntimeError, match="backward: expected a loss that depends on parameters"),
        torch.no_grad(),
    ):
        engine.backward(engine(0, {"always"}))
    elsewhere = torch.nn.Parameter(torch.ones(()))
    engine.backward(elsewhere * 2)
    before = state_of(engine)
    with pytest.raises(RuntimeError, match="step: expected gradients, got none on any rank"):
        engine.step()
    assert_same_bits(state_of(engine), before)
    engine.backward(engine(0, {"always"}))
    engine.step()
    assert engine.was_step_applied(), "and training can go on"
    engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_a_loss_that_reaches_no_parameter_is_an_error_with_its_reason(place, world):
    run_distributed(world, _losses_that_reach_nothing, place)


def _only_one_rank_has_gradients(place):
    rank, world = rank_and_world()
    engine = start(_Parts(), Setup(*place, optimizer=CPU_ADAMW))
    for step in range(2):
        loss = engine(step, {"always"}) if rank == 0 else torch.ones((), requires_grad=True) * 1.0
        engine.backward(loss)
        engine.step()
    state = state_of(engine)
    engine.destroy()
    return state


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_without_any_gradient_takes_part_with_zeros(place):
    states = run_distributed(3, _only_one_rank_has_gradients, place, timeout_s=60)
    first = next(iter(states[0].values()))
    assert not torch.equal(first, torch.linspace(1, 2, 5))
    for state in states[1:]:
        assert_same_bits(state, states[0])


def _expert_parameters():
    model = _Parts()
    model.never.allreduce = False
    with pytest.raises(NotImplementedError, match=r"model: expected parameters .* got \['never'\]"):
        start(model, Setup(2, True))
    model.never.allreduce = True
    start(model, Setup(2, True)).destroy()


def test_parameters_marked_as_experts_are_refused_instead_of_being_averaged_over_all_ranks():
    run_distributed(2, _expert_parameters)
