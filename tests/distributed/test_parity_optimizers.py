"""Any elementwise torch optimizer, of the client or the configuration, with and without offload."""

import functools
import itertools

import pytest
import torch

from tests.distributed.harness import run_distributed
from tests.distributed.training import (
    STEPS,
    ExactModel,
    Setup,
    exact_grad,
    start,
    state_of,
    total_numel,
    train_exact,
)

PLACES = [(0, False), (1, False), (2, False), (1, True), (2, True)]


class SignDescent(torch.optim.Optimizer):
    """A client's own elementwise optimizer, under a name that nobody knows; keeps no state."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad.sign(), alpha=group["lr"])


CLIENTS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.25}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.25, "momentum": 0.5, "weight_decay": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.5}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.5, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-2}),
    "unknown": (SignDescent, {"lr": 2.0**-6}),
}


def _reference(name):
    cls, settings = CLIENTS[name]
    model = ExactModel()
    optimizer = cls(model.parameters(), **settings)
    for step in range(STEPS):
        pieces = exact_grad(step, total_numel(model)).split([param.numel() for param in model.parameters()])
        for param, piece in zip(model.parameters(), pieces, strict=True):
            param.grad = piece.view_as(param)
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def _train_clients():
    return {name: _train_client(name) for name in CLIENTS}


@functools.cache
def _trained_clients(world):
    """All clients in one process group: what each rank saw."""
    return run_distributed(world, _train_clients)


def _train_client(name):
    cls, settings = CLIENTS[name]
    results = []
    for place in PLACES:
        model = ExactModel()
        client = cls(model.parameters(), **settings)
        engine = start(model, Setup(*place, optimizer=None), optimizer=client)
        assert engine.optimizer.optimizer is client
        assert type(client) is cls
        train_exact(engine)
        results.append(state_of(engine))
        engine.destroy()
    return results


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", CLIENTS)
def test_a_clients_elementwise_optimizer_trains_as_it_does_alone(name, world):
    expected = _reference(name)
    for results in _trained_clients(world):
        for place, state in zip(PLACES, results[name], strict=True):
            for param, tensor in expected.items():
                # The same operations on a flat shard; torch may vectorise them otherwise there.
                torch.testing.assert_close(
                    state[f"{param}.master"],
                    tensor,
                    rtol=STEPS * 4 * 2.0**-23,
                    atol=STEPS * 2.0**-23,
                    msg=lambda text, param=param, place=place: f"{param} at {place}: {text}",
                )


# Optimizers that have state already ------------------------------------------------------------------------


def _continue_a_warm_optimizer(name):
    cls, settings = CLIENTS[name]
    results = []
    for place in PLACES:
        model = ExactModel()
        client = cls(model.parameters(), **settings)
        for step in range(3):
            pieces = exact_grad(step, total_numel(model)).split([p.numel() for p in model.parameters()])
            for param, piece in zip(model.parameters(), pieces, strict=True):
                param.grad = piece.view_as(param)
            client.step()
            client.zero_grad()
        engine = start(model, Setup(*place, optimizer=None), optimizer=client)
        train_exact(engine, STEPS - 3, first=3)
        results.append(state_of(engine))
        engine.destroy()
    return results


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["AdamW", "SGD with momentum", "Adagrad", "RMSprop"])
def test_an_optimizer_that_has_stepped_before_initialize_goes_on_where_it_was(name, world):
    expected = _reference(name)
    for results in run_distributed(world, _continue_a_warm_optimizer, name):
        for place, state in zip(PLACES, results, strict=True):
            for param, tensor in expected.items():
                torch.testing.assert_close(
                    state[f"{param}.master"],
                    tensor,
                    rtol=STEPS * 4 * 2.0**-23,
                    atol=STEPS * 2.0**-23,
                    msg=lambda text, param=param, place=place: f"{param} at {place}: {text}",
                )


def _odd_states(place):
    rows = exact_grad(0, total_numel(ExactModel()))
    model = ExactModel()
    client = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.weight.grad = rows[:15].view(5, 3)
    client.step()  # the other parameters have no state
    client.zero_grad()
    weight = model.weight.detach().clone()
    engine = start(model, Setup(*place, optimizer=None), optimizer=client)
    train_exact(engine, 1)
    moments = state_of(engine)["weight.exp_avg"]
    engine.destroy()
    assert torch.allclose(moments, 0.1 * rows[:15].view(5, 3)), "as after a first step"
    assert not torch.equal(model.weight, weight)


@pytest.mark.parametrize("place", PLACES)
def test_an_optimizer_whose_parameters_stepped_unevenly_starts_afresh(place):
    run_distributed(2, _odd_states, place)


def _state_dict_names_only_what_is_there(name):
    cls, settings = CLIENTS[name]
    for place in PLACES:
        model = ExactModel()
        client = cls(model.parameters(), **settings)
        engine = start(model, Setup(*place, optimizer=None), optimizer=client)
        masters = {id(group["params"][0]) for group in client.param_groups}
        assert all(id(key) in masters for key in client.state), "nothing is kept beside the shard's state"
        engine.optimizer.state_dict()
        train_exact(engine, 1)
        assert all(id(key) in masters for key in client.state)
        saved = engine.optimizer.state_dict()["base_optimizer_state"]["state"]
        assert len(saved) == (1 if client.state else 0)
        engine.destroy()


@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "SGD with momentum"])
def test_an_inner_optimizer_holds_state_for_its_shard_alone(name):
    run_distributed(2, _state_dict_names_only_what_is_there, name)


# By name, and live settings --------------------------------------------------------------------------------


def _train_named(named):
    results = []
    for place in PLACES:
        engine = start(ExactModel(), Setup(*place, optimizer=named))
        train_exact(engine)
        results.append((type(engine.optimizer.optimizer).__name__, state_of(engine)))
        engine.destroy()
    return results


@pytest.mark.parametrize("world", [1, 3])
def test_lion_by_name_gives_the_same_bits_on_host_and_device(world):
    named = {"type": "Lion", "params": {"lr": 2.0**-6, "weight_decay": 0.5, "betas": [0.9, 0.99]}}
    for results in run_distributed(world, _train_named, named):
        assert [name for name, _ in results] == ["FusedLion"] * 3 + ["DeepSpeedCPULion"] * 2
        for _, state in results[1:]:
            torch.testing.assert_close(state, results[0][1], rtol=STEPS * 4 * 2.0**-23, atol=0)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["Adagrad", "RMSprop", "SGD"])
def test_optimizers_of_torch_can_be_named_with_and_without_offload(name, world):
    for results in run_distributed(world, _train_named, {"type": name, "params": {"lr": 1e-2}}):
        for _, state in results[1:]:
            masters = {key: value for key, value in state.items() if key.endswith("master")}
            expected = {key: results[0][1][key] for key in masters}
            torch.testing.assert_close(masters, expected, rtol=STEPS * 4 * 2.0**-23, atol=0)


class MuonLike(torch.optim.SGD):
    """Needs whole matrices; known by its name."""


def _refuse(client, named):
    model = ExactModel()
    kwargs = {"optimizer": MuonLike(model.parameters(), lr=0.1)} if client else {}
    setup = Setup(2, True, optimizer=None if client else {"type": named, "params": {"lr": 0.1}})
    with pytest.raises(
        (ValueError, NotImplementedError), match=r"expected an elementwise optimizer, got .*Muon"
    ):
        start(model, setup, **kwargs)
    start(model, Setup(2, True)).destroy()


@pytest.mark.parametrize("client", [True, False])
def test_an_optimizer_that_needs_whole_matrices_is_refused_before_any_collective(client):
    run_distributed(2, _refuse, client, "Muon")


def _live_settings(place, client):
    """A rate that changes through the user's group dict, the optimizer's, and a schedule over the user's."""
    model = ExactModel()
    names = list(dict(model.named_parameters()))
    groups = [
        {"params": [getattr(model, name) for name in names[:3]], "lr": 0.5},
        {"params": [getattr(model, name) for name in names[3:]], "lr": 0.25},
    ]
    if client:
        optimizer = torch.optim.SGD(groups, lr=1.0)
        engine = start(model, Setup(*place, optimizer=None), optimizer=optimizer)
        groups = optimizer.param_groups
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    else:
        engine = start(
            model, Setup(*place, optimizer={"type": "SGD", "params": {"lr": 1.0}}), model_parameters=groups
        )
    assert all(ours is theirs for ours, theirs in zip(engine.optimizer.param_groups, groups, strict=True))

    def rates_of_a_step(step):
        before = state_of(engine)
        train_exact(engine, 1, first=step)
        after = state_of(engine)
        grads = exact_grad(step, total_numel(model)).split([param.numel() for param in model.parameters()])
        rates = []
        for name, grad in zip(names, grads, strict=True):
            difference = (before[f"{name}.master"] - after[f"{name}.master"]).view(-1)
            nonzero = grad != 0
            rates.append((difference[nonzero] / grad[nonzero]).tolist())
        # Weights below 16 are rounded to 2^-20; gradients are at least an eighth.
        assert all(
            rate == pytest.approx(rate_of_param[0], abs=2.0**-16)
            for rate_of_param in rates
            for rate in rate_of_param
        )
        return [round(rates[0][0], 3), round(rates[-1][0], 3)]

    assert rates_of_a_step(0) == [0.5, 0.25]
    if client:
        schedule.step()
        assert rates_of_a_step(1) == [0.25, 0.125]
    groups[0]["lr"] = 0.0
    groups[1]["lr"] = 1.0
    assert rates_of_a_step(2) == [0.0, 1.0]
    engine.optimizer.param_groups[0]["lr"] = 0.5
    assert rates_of_a_step(3) == [0.5, 1.0]
    engine.destroy()
    assert [len(group["params"]) for group in groups] == [3, len(names) - 3], "the parameters are given back"
    assert groups[0]["params"][0] is model.weight


@pytest.mark.parametrize("client", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_group_dicts_are_the_users_own_and_read_at_each_step(place, client):
    run_distributed(2, _live_settings, place, client)


# Shards without elements -----------------------------------------------------------------------------------


class _Scalars(torch.nn.Module):
    """Groups of one element: all ranks but the first own nothing of them."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.tensor(1.0))
        self.second = torch.nn.Parameter(torch.tensor([2.0]))

    def forward(self, row):
        return self.first * row[0] + (self.second * row[1]).sum()


def _train_scalars(name):
    results = []
    for place, clipping in itertools.product(PLACES, (0.0, 0.5)):
        model = _Scalars()
        groups = [{"params": [model.first]}, {"params": [model.second]}]
        cls, settings = CLIENTS.get(name, (None, None))
        if cls is None:
            engine = start(model, Setup(*place, clipping=clipping), model_parameters=groups)
        else:
            client = cls(groups, **settings)
            engine = start(model, Setup(*place, optimizer=None, clipping=clipping), optimizer=client)
        for step in range(3):
            engine.backward(engine(torch.tensor([1.0, 2.0]) * (step + 1)))
            engine.step()
            assert engine.get_global_grad_norm() == pytest.approx((step + 1) * 5**0.5, rel=1e-12)
        results.append(state_of(engine))
        engine.optimizer.state_dict()
        engine.destroy()
    return results


EMPTY_SHARD_CASES = ("configuration's AdamW", *CLIENTS)


def _train_scalars_in_turn():
    return {name: _train_scalars(name) for name in EMPTY_SHARD_CASES}


@functools.cache
def _trained_scalars(world):
    return run_distributed(world, _train_scalars_in_turn)


@pytest.mark.parametrize("name", EMPTY_SHARD_CASES)
def test_ranks_with_empty_shards_train_along(name):
    (alone,) = _trained_scalars(1)
    for results in _trained_scalars(3):
        for state, expected in zip(results[name], alone[name], strict=True):
            # FusedAdam and torch's foreach code round single elements and vectors differently.
            torch.testing.assert_close(state, expected, rtol=3 * 4 * 2.0**-23, atol=0)
