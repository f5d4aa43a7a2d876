"""Adagrad and Lion on the host, FusedAdam, and what clients ask of deepspeed.ops."""

import pytest
import torch

import deepspeed.ops
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.aio import AsyncIOBuilder
from deepspeed.ops.lion import DeepSpeedCPULion
from tests.unit.ops.reference import FLOATS
from tests.unit.ops.test_cpu_adam_optimizer import make_params, set_gradients, train


def test_adagrad_is_torchs_bit_for_bit():
    shapes = [(3, 5), (0,), (1_100_003,)]
    ours, theirs = make_params(shapes), make_params(shapes)
    optimizer = DeepSpeedCPUAdagrad(ours, lr=0.1, weight_decay=0.1, adamw_mode=False)
    train(optimizer, 3)
    train(torch.optim.Adagrad(theirs, lr=0.1, weight_decay=0.1, foreach=False), 3)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert optimizer.state[ours[0]]["step"] == 3


def test_lion_follows_its_paper():
    (param,) = make_params([(1_100_003,)])
    expected, moment = param.detach().clone(), torch.zeros_like(param.detach())
    optimizer = DeepSpeedCPULion([param], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, adamw_mode=False)
    for step in range(3):
        set_gradients([param], step)
        optimizer.step()
        direction = torch.sign(0.9 * moment + 0.1 * param.grad)
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * direction
        moment = 0.99 * moment + 0.01 * param.grad
    # 3 steps of one fp32 rounding each; where the direction's sign hangs on a rounding, a whole step of 2 lr.
    near_zero = (param.detach() - expected).abs() > 1e-6
    assert near_zero.float().mean() < 1e-5
    assert set(optimizer.state[param]) == {"step", "exp_avg"}


@pytest.mark.parametrize("cls", [DeepSpeedCPUAdagrad, DeepSpeedCPULion])
@pytest.mark.parametrize("dtype", FLOATS)
def test_16_bit_parameters_are_updated_in_fp32_and_rounded_once(cls, dtype):
    (param,) = make_params([(500,)], dtype)
    wide = torch.nn.Parameter(param.detach().float())
    optimizer, reference = cls([param], lr=0.01), cls([wide], lr=0.01)
    set_gradients([param], 0)
    wide.grad = param.grad.float()
    optimizer.step()
    reference.step()
    assert torch.equal(param, wide.detach().to(dtype))
    (moment,) = (value for value in optimizer.state[param].values() if torch.is_tensor(value))
    assert moment.dtype == torch.float32


@pytest.mark.parametrize("cls", [DeepSpeedCPUAdagrad, DeepSpeedCPULion])
def test_parameter_off_the_host_is_an_error(cls):
    param = torch.nn.Parameter(torch.zeros(4, device="meta"))
    param.grad = torch.zeros_like(param)
    with pytest.raises(ValueError, match="^params: expected contiguous CPU tensors"):
        cls([param]).step()


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_fused_adam_is_torchs_fused_kernel(adam_w_mode):
    ours, theirs = make_params([(30,), (4, 5)]), make_params([(30,), (4, 5)])
    optimizer = FusedAdam(ours, lr=0.01, weight_decay=0.1, adam_w_mode=adam_w_mode)
    reference_cls = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    reference = reference_cls(theirs, lr=0.01, weight_decay=0.1, fused=True)
    train(optimizer, 2)
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, 2, first=2)
    train(reference, 4)
    for a, b in zip(ours, theirs, strict=True):
        # Equal bits, but for torch 2.6: its AdamW decays within the kernel, ours before it. 4 steps of 2 ulp.
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)


def test_fused_adam_clears_gradients_as_told():
    (param,) = make_params([(3,)])
    optimizer = FusedAdam([param], set_grad_none=False)
    set_gradients([param], 0)
    optimizer.zero_grad()
    assert not param.grad.any()
    optimizer.zero_grad(set_to_none=True)
    assert param.grad is None
    with pytest.raises(NotImplementedError, match="^bias_correction: expected True, got False"):
        FusedAdam([param], bias_correction=False)


def test_availability_checks_find_their_names():
    assert deepspeed.ops.__compatible_ops__[AsyncIOBuilder.NAME] is False
    assert deepspeed.ops.__compatible_ops__["cpu_adam"] is True
    assert not AsyncIOBuilder().is_compatible()
    with pytest.raises(NotImplementedError, match="^async_io: "):
        AsyncIOBuilder().load()
