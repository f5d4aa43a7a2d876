"""`safe_get_full_*` and `safe_set_full_*`: whole values on every rank, always, obeyed by the step."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tests.distributed.harness import run_distributed
from tests.distributed.training import (
    ExactModel,
    Setup,
    exact_grad,
    exact_rows,
    rank_and_world,
    start,
    total_numel,
    train_exact,
)

PLACES = [(0, False), (1, False), (2, False), (1, True), (2, True)]
DTYPES = ("fp32", "bf16", "fp16")
SGD = {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.5}}
WORLDS = pytest.mark.parametrize("world", [1, 2, 3])


def _setups(accumulation=1):
    return [
        Setup(*place, accumulation, bucket_numel=7, dtype=dtype, optimizer=SGD)
        for place in PLACES
        for dtype in DTYPES
    ]


def _params(engine):
    return [param for param in engine.module.parameters() if param.requires_grad]


def _pieces(flat, params):
    return [
        piece.view_as(param)
        for param, piece in zip(params, flat.split([p.numel() for p in params]), strict=True)
    ]


def _backward(engine, step, part=0):
    """A micro-batch; all of a step's together give `exact_grad`."""
    rank, world = rank_and_world()
    accumulation = engine.gradient_accumulation_steps()
    rows = exact_rows(step, total_numel(engine.module)).chunk(world * accumulation)
    engine.backward(engine(rows[rank * accumulation + part]) * (world * accumulation / 8))


def _read_everything():
    for setup in _setups():
        engine = start(ExactModel(), setup)
        params = _params(engine)
        grads = _pieces(exact_grad(0, total_numel(engine.module)), params)
        initial = [param.detach().clone() for param in ExactModel().parameters()]
        assert all(safe_get_full_grad(param) is None for param in params)
        assert all(safe_get_full_optimizer_state(param, "momentum_buffer") is None for param in params)
        for param, value in zip(params, initial, strict=True):
            master = safe_get_full_fp32_param(param)
            assert master.dtype == torch.float32 and master.shape == param.shape
            # The master starts from the weight as initialize cast it.
            assert torch.equal(master, value.to(param.dtype).float())
        _backward(engine, 0)
        for param, grad in zip(params, grads, strict=True):
            assert torch.equal(safe_get_full_grad(param), grad), setup
        engine.step()
        for param, grad, value in zip(params, grads, initial, strict=True):
            assert safe_get_full_grad(param) is None
            assert torch.equal(safe_get_full_fp32_param(param), value.to(param.dtype).float() - grad)
            assert torch.equal(safe_get_full_optimizer_state(param, "momentum_buffer"), grad)
            assert safe_get_full_optimizer_state(param, "exp_avg") is None
        engine.destroy()
        assert all(safe_get_full_fp32_param(param) is None for param in params)


@WORLDS
def test_getters_give_every_rank_the_whole_value_in_the_parameters_shape(world):
    run_distributed(world, _read_everything)


def _read_while_accumulating():
    _, world = rank_and_world()
    for setup in _setups(accumulation=4):
        engine = start(ExactModel(), setup)
        params = _params(engine)
        for part in range(4):
            _backward(engine, 0, part)
            seen = [safe_get_full_grad(param) for param in params]
            if part < 3 and world > 1 and setup.stage < 2:
                assert seen == [None] * len(params), "still with each rank"
            elif part < 3:
                assert all(grad is not None for grad in seen), "the sum so far"
            engine.step() if part < 3 else None
        for grad, expected in zip(
            seen, _pieces(exact_grad(0, total_numel(engine.module)), params), strict=True
        ):
            assert torch.equal(grad, expected), setup
        engine.step()
        engine.destroy()


@WORLDS
def test_a_gradient_read_before_the_step_is_the_mean_of_all_micro_batches_and_ranks(world):
    run_distributed(world, _read_while_accumulating)


class _Shared(torch.nn.Module):
    """One layer under two re-entrant checkpoints: the second contribution comes after its bucket has gone."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.layer = torch.nn.Linear(4, 4, bias=False)

    def forward(self, hidden):
        hidden = self.first(hidden)
        for _ in range(2):
            hidden = checkpoint(self.layer, hidden, use_reentrant=True)
        return hidden.square().sum()


def _late_contributions(set_to):
    torch.manual_seed(0)
    plain = _Shared()
    hidden = torch.randn(3, 4)
    plain(hidden).backward()
    expected = plain.layer.weight.grad
    for place in PLACES:
        torch.manual_seed(0)
        engine = start(
            _Shared(), Setup(*place, bucket_numel=1, optimizer={"type": "SGD", "params": {"lr": 1.0}})
        )
        layer = engine.module.layer.weight
        before = layer.detach().clone()
        engine.backward(engine(hidden))
        if set_to is None:
            # fp32, in another order.
            torch.testing.assert_close(safe_get_full_grad(layer), expected, rtol=1e-6, atol=1e-6)
        else:
            safe_set_full_grad(layer, torch.full_like(layer, set_to))
            assert torch.equal(safe_get_full_grad(layer), torch.full_like(layer, set_to))
        engine.step()
        moved = expected if set_to is None else torch.full_like(layer, set_to)
        torch.testing.assert_close(before - layer, moved, rtol=1e-6, atol=1e-6)
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("set_to", [None, 0.5])
def test_a_contribution_after_its_buckets_launch_is_read_and_can_be_overwritten(set_to, world):
    run_distributed(world, _late_contributions, set_to)


def _write_everything():
    for setup in _setups():
        engine = start(ExactModel(), setup)
        params = _params(engine)
        train_exact(engine, 1)
        _backward(engine, 1)
        numel = total_numel(engine.module)
        # Distinct in every element, and exact in every dtype.
        flat = torch.arange(numel) % 64 / 16 + 1
        masters, grads, momenta = (_pieces(flat + shift, params) for shift in (0, 1, 2))
        for param, master, grad, momentum in zip(params, masters, grads, momenta, strict=True):
            safe_set_full_fp32_param(param, master)
            safe_set_full_grad(param, grad)
            safe_set_full_optimizer_state(param, momentum, "momentum_buffer")
            assert torch.equal(param.detach().float(), master)
            assert torch.equal(safe_get_full_fp32_param(param), master)
            assert torch.equal(safe_get_full_grad(param), grad)
            assert torch.equal(safe_get_full_optimizer_state(param, "momentum_buffer"), momentum)
        engine.step()
        norm = (flat.double() + 1).square().sum().sqrt().item()
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-12), setup
        for param, master, grad, momentum in zip(params, masters, grads, momenta, strict=True):
            updated = momentum * 0.5 + grad
            assert torch.equal(safe_get_full_optimizer_state(param, "momentum_buffer"), updated)
            assert torch.equal(safe_get_full_fp32_param(param), master - updated)
            assert torch.equal(param.detach(), (master - updated).to(param.dtype))
        engine.destroy()


@WORLDS
def test_setters_write_every_ranks_part_and_the_step_obeys(world):
    run_distributed(world, _write_everything)


def _wrong_use():
    for place in PLACES:
        engine = start(ExactModel(), Setup(*place))
        weight = engine.module.weight
        with pytest.raises(RuntimeError, match="safe_set_full_grad: expected reduced gradients, got none"):
            safe_set_full_grad(weight, torch.ones(5, 3))
        train_exact(engine, 1)
        assert safe_get_full_optimizer_state(weight, "step").item() == 1
        with pytest.raises(ValueError, match=r"value: expected shape \(5, 3\), got \(3, 5\)"):
            safe_set_full_fp32_param(weight, torch.ones(3, 5))
        for key in ("momentum_buffer", "step"):
            with pytest.raises(KeyError, match=r"expected one of \['exp_avg', 'exp_avg_sq'\], got '" + key):
                safe_set_full_optimizer_state(weight, torch.ones(5, 3), key)
        engine.destroy()
        with pytest.raises(RuntimeError, match="param: expected a parameter of a live DeepSpeed engine"):
            safe_set_full_fp32_param(weight, torch.ones(5, 3))


@pytest.mark.parametrize("world", [1, 2])
def test_wrong_use_of_the_setters_is_an_error_by_name(world):
    run_distributed(world, _wrong_use)
