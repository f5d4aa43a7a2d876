"""Parameter groups of every shape: split, empty, frozen, of one scalar, of parameters without elements."""

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.distributed.harness import run_distributed
from tests.small_engine import ds_config, full_weights

STEPS = 5
WAYS = [(0, False), (1, False), (1, True), (2, False), (2, True)]  # stage, offload

pytestmark = [
    pytest.mark.parametrize("world", [1, 2, 3]),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
]


class Net(torch.nn.Module):
    """Three layers, a scalar gain, and after `empty_at` of them a Linear(8, 0) whose output is appended."""

    def __init__(self, empty_at=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
        self.gain = torch.nn.Parameter(torch.tensor(1.5))
        if empty_at is not None:
            self.layers.insert(empty_at, torch.nn.Linear(8, 0))

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            x = torch.tanh(y) if y.shape[-1] else torch.cat([x, y], dim=-1)
        return self.gain * x


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 8, generator=generator)


def loss_of(output):
    return (output - 0.5).square().mean()


def one_group(net):
    return [{"params": list(net.parameters()), "lr": 0.01}]


def two_groups(net):
    params = list(net.parameters())
    return [{"params": params[::2], "lr": 0.01}, {"params": params[1::2], "lr": 0.01}]


def shuffled_groups(net):
    params = list(net.parameters())
    return [{"params": params[4:][::-1], "lr": 0.01}, {"params": params[:4], "lr": 0.01}]


def settings_differ(net):
    params = list(net.parameters())
    return [
        {"params": params[:3], "lr": 0.02, "weight_decay": 0.1},
        {"params": params[3:], "lr": 0.005, "betas": (0.5, 0.9)},
    ]


def scalar_group(net):
    return [{"params": [net.gain], "lr": 0.05}, {"params": list(net.layers.parameters()), "lr": 0.01}]


def empty_groups(net):
    first, *rest = net.parameters()
    return [
        {"params": [], "lr": 1.0},
        {"params": [first], "lr": 0.01},
        {"params": [], "lr": 1.0},
        {"params": rest, "lr": 0.01},
    ]


def frozen_group(net):
    net.layers[1].requires_grad_(False)
    return [{"params": list(layer.parameters()), "lr": 0.01} for layer in net.layers] + [
        {"params": [net.gain], "lr": 0.01}
    ]


def partly_frozen(net):
    for layer in net.layers:
        layer.bias.requires_grad_(False)
    return one_group(net)


def elementless_group(net):
    """The group of the Linear(8, 0) holds nothing but parameters without elements."""
    return [{"params": list(layer.parameters()), "lr": 0.01} for layer in net.layers] + [
        {"params": [net.gain], "lr": 0.01}
    ]


def train(stage, offload, empty_at, make_groups):
    """Final parameters by name, after steps on a batch of this rank's own; and the masters, flat."""
    net = Net(empty_at)
    config = ds_config(
        stage, offload, optimizer={"type": "AdamW", "params": {"lr": 1.0, "weight_decay": 0.0}}
    )
    engine = deepspeed.initialize(model=net, model_parameters=make_groups(net), config=config)[0]
    for step in range(STEPS):
        engine.backward(loss_of(engine(batch(step, dist.get_rank()))))
        engine.step()
    masters = full_weights(engine) if empty_at is None else None
    weights = {name: param.detach().clone() for name, param in net.named_parameters()}
    engine.destroy()
    return weights, masters


def train_torch(world, empty_at, make_groups):
    """The same with torch.optim.AdamW, on the mean of all ranks' losses."""
    net = Net(empty_at)
    groups = [group for group in make_groups(net) if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=1.0, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(loss_of(net(batch(step, rank))) for rank in range(world)).div(world).backward()
        optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}


def _train_each(empty_at, *groupings):
    return [[train(stage, offload, empty_at, groups) for stage, offload in WAYS] for groups in groupings]


def assert_close_to_torch(weights, reference):
    for name, value in reference.items():
        # Losses are averaged in another order: a few ulp of the gradient, which Adam makes as many of lr.
        torch.testing.assert_close(
            weights[name], value, rtol=0, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


GROUPINGS = [settings_differ, scalar_group, empty_groups, frozen_group, partly_frozen]


def test_any_grouping_trains_as_torch_does(world):
    for results in run_distributed(world, _train_each, None, *GROUPINGS):
        for grouping, ways in zip(GROUPINGS, results, strict=True):
            reference = train_torch(world, None, grouping)
            for weights, _ in ways:
                assert_close_to_torch(weights, reference)


def test_how_parameters_are_grouped_changes_nothing(world):
    for results in run_distributed(world, _train_each, None, one_group, two_groups, shuffled_groups):
        for (stage, offload), ways in zip(WAYS, zip(*results, strict=True), strict=True):
            one, two, shuffled = (torch.tensor(masters) for _, masters in ways)
            # Bitwise under offload; torch's fused kernel rounds the tail of a tensor otherwise than its body.
            atol = 0.0 if offload else 1e-7
            for other in (two, shuffled):
                torch.testing.assert_close(
                    other, one, rtol=0, atol=atol, msg=f"stage {stage}, offload {offload}"
                )


def _train_with_empty_layers(*groupings):
    return {empty_at: _train_each(empty_at, *groupings) for empty_at in (0, 2, 3)}


def test_a_layer_without_elements_keeps_its_shape_and_the_rest_trains(world):
    groupings = one_group, elementless_group
    for by_place in run_distributed(world, _train_with_empty_layers, *groupings):
        for empty_at, results in by_place.items():
            for grouping, ways in zip(groupings, results, strict=True):
                reference = train_torch(world, empty_at, grouping)
                for weights, _ in ways:
                    assert weights[f"layers.{empty_at}.weight"].shape == (0, 8)
                    assert weights[f"layers.{empty_at}.bias"].shape == (0,)
                    assert_close_to_torch(weights, reference)


def _frozen_facts():
    facts = []
    for stage, offload in WAYS:
        net = Net()
        before = net.layers[1].weight.detach().clone()
        engine = deepspeed.initialize(
            model=net, model_parameters=frozen_group(net), config=ds_config(stage, offload)
        )[0]
        engine.backward(loss_of(engine(batch(0, 0))))
        engine.step()
        numels = [group["params"][0].numel() for group in engine.optimizer.param_groups]
        facts.append((torch.equal(before, net.layers[1].weight), net.layers[1].weight.grad is None, numels))
        engine.destroy()
    return facts


def test_frozen_parameters_have_no_master_no_gradient_and_do_not_move(world):
    ranks = run_distributed(world, _frozen_facts)
    for (stage, _), facts in zip(WAYS, zip(*ranks, strict=True), strict=True):
        assert all(same and no_grad for same, no_grad, _ in facts)
        totals = [sum(numels) for numels in zip(*(numels for _, _, numels in facts), strict=True)]
        copies = world if stage == 0 else 1
        # The groups: two layers of 72, the frozen one between them, and the scalar; padding is nowhere.
        assert totals == [copies * numel for numel in (72, 0, 72, 1)]


def _live_settings():
    """A group is given a rate of 0 for one step, through the optimizer and through the user's dict."""
    moved = []
    for stage, offload in WAYS:
        net = Net()
        groups = scalar_group(net)
        engine, optimizer, _, _ = deepspeed.initialize(
            model=net, model_parameters=groups, config=ds_config(stage, offload)
        )
        for owner in (optimizer.param_groups, groups):
            owner[0]["lr"] = 0.0
            gain, weight = net.gain.item(), net.layers[0].weight.detach().clone()
            engine.backward(loss_of(engine(batch(0, 0))))
            engine.step()
            moved.append((net.gain.item() == gain, torch.equal(net.layers[0].weight, weight)))
            owner[0]["lr"] = 0.05
        engine.destroy()
    return moved


def test_a_groups_rate_is_read_at_each_step_from_the_users_own_dict(world):
    for moved in run_distributed(world, _live_settings):
        assert moved == [(True, False)] * (2 * len(WAYS))
