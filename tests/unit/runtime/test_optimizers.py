"""Optimizers by name: which class, which defaults, and what cannot run on flat shards."""

import pytest
import torch

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.optimizers import build_optimizer, check_client_optimizer, check_elementwise

CONFIG = DeepSpeedConfig({"train_batch_size": 1})


def make_params(count=2):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, 2)) for _ in range(count)]


def build(name, offload=False, zero_enabled=True, **params):
    return build_optimizer(name, params, make_params(), offload, zero_enabled)


@pytest.mark.parametrize(
    ("name", "offload", "expected"),
    [
        ("Adam", False, FusedAdam),
        ("adamw", False, FusedAdam),
        ("AdamW", True, DeepSpeedCPUAdam),
        ("adam", True, DeepSpeedCPUAdam),
        ("Adagrad", False, torch.optim.Adagrad),
        ("Adagrad", True, DeepSpeedCPUAdagrad),
        ("Lion", False, FusedLion),
        ("lion", True, DeepSpeedCPULion),
        ("SGD", False, torch.optim.SGD),
        ("sgd", True, torch.optim.SGD),
        ("RMSprop", True, torch.optim.RMSprop),
        ("nadam", False, torch.optim.NAdam),
    ],
)
def test_a_name_chooses_the_class(name, offload, expected):
    assert type(build(name, offload)) is expected


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("name", "params", "decoupled"),
    [
        ("Adam", {}, True),
        ("Adam", {"adam_w_mode": False}, False),
        ("AdamW", {"adam_w_mode": False}, True),
        ("AdamW", {}, True),
    ],
)
def test_adam_decouples_its_decay_unless_told_otherwise_as_in_deepspeed(name, params, decoupled, offload):
    optimizer = build(name, offload, weight_decay=0.5, lr=0.1, **params)
    (reference_class,) = {torch.optim.AdamW} if decoupled else {torch.optim.Adam}
    reference = reference_class(make_params(), lr=0.1, weight_decay=0.5)
    for optim in (optimizer, reference):
        for param in optim.param_groups[0]["params"]:
            param.grad = torch.full_like(param, 0.25)
        optim.step()
    for mine, theirs in zip(
        optimizer.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True
    ):
        # One step of fp32 arithmetic in another order: a rounding or two.
        assert torch.allclose(mine, theirs, rtol=3e-7, atol=1e-8)


def test_torch_adam_takes_torchs_own_class_and_defaults():
    optimizer = build("Adam", torch_adam=True)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["weight_decay"] == 0.01
    assert type(build("Adam", torch_adam=True, adam_w_mode=False)) is torch.optim.Adam


def test_weight_decay_is_zero_unless_given():
    assert build("AdamW").defaults["weight_decay"] == 0
    assert build("AdamW", offload=True).defaults["weight_decay"] == 0


def test_group_dicts_are_kept_not_copied():
    groups = [{"params": make_params(1), "lr": 0.5}, {"params": make_params(1)}]
    optimizer = build_optimizer("AdamW", {"lr": 0.1}, groups, offload=True)
    assert all(mine is theirs for mine, theirs in zip(optimizer.param_groups, groups, strict=True))
    assert [group["lr"] for group in groups] == [0.5, 0.1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Muon", "orthogonalises whole matrices"),
        ("Adafactor", "row and column statistics"),
        ("LBFGS", "inner products over all parameters"),
        ("SparseAdam", "sparse gradients"),
        ("Lamb", "norm of each layer"),
        ("OneBitAdam", "compresses gradients"),
        ("OneBitLamb", "norm of each layer"),
        ("ZeroOneAdam", "compresses gradients"),
        ("Shampoo", "preconditions whole matrices"),
        ("SOAP", "preconditions whole matrices"),
        ("MuAdamW", "shape of each layer"),
    ],
)
def test_what_needs_whole_matrices_is_refused_with_its_reason(name, reason):
    with pytest.raises(NotImplementedError, match=f"optimizer.type: .*{name}.*{reason}"):
        build(name)


def test_without_shards_torchs_whole_matrix_optimizers_run():
    assert type(build("Muon", zero_enabled=False)) is torch.optim.Muon


def test_an_unknown_name_lists_what_is_known():
    with pytest.raises(
        ValueError, match="optimizer.type: expected Adam, AdamW, Adagrad, Lion or .*, got 'Adem'"
    ):
        build("Adem")


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "Adagrad"])
@pytest.mark.parametrize("offload", [False, True])
def test_an_unknown_parameter_is_named(name, offload):
    with pytest.raises(ValueError, match=r"optimizer.params.learning_rate: expected a parameter of .*\blr\b"):
        build(name, offload, learning_rate=1)


def test_clipping_inside_the_optimizer_points_to_gradient_clipping():
    with pytest.raises(ValueError, match=r"optimizer.params.max_grad_norm: .*Use gradient_clipping"):
        build("Adam", max_grad_norm=1.0)


class MuonWithAuxAdam(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        pass


class MyOwnRule(MuonWithAuxAdam):
    pass


class Elementwise(torch.optim.SGD):
    pass


@pytest.mark.parametrize("optimizer_class", [MuonWithAuxAdam, MyOwnRule, torch.optim.LBFGS, torch.optim.Muon])
def test_a_client_optimizer_over_whole_matrices_is_refused_by_its_class(optimizer_class):
    with pytest.raises(ValueError, match="optimizer: expected an elementwise optimizer"):
        check_elementwise(optimizer_class(make_params()))


@pytest.mark.parametrize(
    "optimizer_class",
    [Elementwise, torch.optim.AdamW, torch.optim.Rprop, torch.optim.ASGD, DeepSpeedCPULion, FusedLion],
)
def test_elementwise_client_optimizers_are_accepted(optimizer_class):
    check_client_optimizer(optimizer_class(make_params()), CONFIG)


def test_a_placeholder_of_an_integration_is_explained():
    class DummyOptim:
        param_groups = []

    with pytest.raises(ValueError, match=r"got DummyOptim without step\(\).*optimizer.type is absent"):
        check_client_optimizer(DummyOptim(), CONFIG)


def test_fused_lion_follows_the_paper_as_the_host_one_does():
    host, fused = (
        DeepSpeedCPULion(make_params(), weight_decay=0.1),
        FusedLion(make_params(), weight_decay=0.1),
    )
    for step in range(5):
        for optimizer in (host, fused):
            generator = torch.Generator().manual_seed(step)
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()
    for mine, theirs in zip(fused.param_groups[0]["params"], host.param_groups[0]["params"], strict=True):
        # Five steps, a rounding or two each.
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-8)
