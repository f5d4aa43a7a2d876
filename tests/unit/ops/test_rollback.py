"""Steps taken back through stock's entry: what they return to, and what they must not leave behind."""

import contextlib
import itertools

import pytest
import torch

from tests.unit.ops.reference import DENORMAL, EPSILON, FLOATS, make_inputs

ID = 7
LR = 1e-2
HYPER = (LR, 0.9, 0.999, 1e-8, 0.1, True)  # lr, betas, eps, weight_decay, bias_correction
SINGLE = EPSILON[torch.float32]


@contextlib.contextmanager
def adam(op, adamw_mode=True):
    op.create_adam(ID, *HYPER[:5], adamw_mode, False)
    yield
    op.destroy_adam(ID)


def assert_close(actual, expected, bound, name):
    excess = ((actual.double() - expected.double()).abs() - bound).max().item() if len(actual) else 0
    assert excess <= 0, f"{name}: {excess} beyond the bound"


def gradients_of_like_size(numel, dtype, count):
    generator = torch.Generator().manual_seed(1)
    signs = torch.randn(count, numel, generator=generator).sign()
    return (signs * (0.5 + torch.rand(count, numel, generator=generator))).to(dtype)


@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("numel", [0, 1, 17, 40_003])
def test_one_step_back_costs_roundings_only(op, numel, adamw_mode):
    for param_type, moment_type in itertools.product(FLOATS, FLOATS):
        tensors = make_inputs(numel, (param_type, param_type, moment_type, moment_type))
        p, g, m, v = (tensor.double() for tensor in tensors)
        with adam(op, adamw_mode):
            op.adam_update(ID, 3, *HYPER, *tensors)
            stepped = [tensor.double() for tensor in tensors]
            op.adam_rollback(ID, 3, *HYPER, *tensors)
        # Stored twice: half a spacing each, and some fp32 roundings. The change was made of moments that were
        # not yet rounded: by half a spacing of the first, and a quarter of one of the second, under the root.
        spacing, moment_spacing = EPSILON[param_type] + 4 * SINGLE, EPSILON[moment_type] + 4 * SINGLE
        change = (stepped[0] - p).abs() + EPSILON[param_type] * p.abs() + LR * 0.1 * p.abs()
        bound = spacing * (p.abs() + change) + moment_spacing * change * (moment_type != torch.float32)
        assert_close(tensors[0], p, 1.01 * bound + 2 * DENORMAL[param_type], "params")
        g = g + (0 if adamw_mode else 0.1) * p
        slip = (0 if adamw_mode else 0.1) * bound  # the decay of the gradient is of the recovered parameters
        bound = moment_spacing * (m.abs() + g.abs()) + 0.1 * slip
        assert_close(tensors[2], m, 1.12 * bound + 2 * DENORMAL[moment_type], "exp_avg")
        bound = moment_spacing * (v + 0.001 * g * g) + 0.002 * g.abs() * slip
        assert_close(tensors[3], v, 1.01 * bound + 2 * DENORMAL[moment_type], "exp_avg_sq")


@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("param_type", FLOATS)
def test_all_steps_back_return_to_the_start(op, param_type, adamw_mode):
    count, numel = 6, 20_001
    start = make_inputs(numel, (param_type,) * 4)[0]
    grads = gradients_of_like_size(numel, param_type, count)
    params, exp_avg, exp_avg_sq = start.clone(), torch.zeros(numel), torch.zeros(numel)
    with adam(op, adamw_mode):
        for step in range(1, count + 1):
            op.adam_update(ID, step, *HYPER, params, grads[step - 1], exp_avg, exp_avg_sq)
        moved = (params.double() - start.double()).abs()
        assert moved.mean() > LR
        for step in range(count, 0, -1):
            op.adam_rollback(ID, step, *HYPER, params, grads[step - 1], exp_avg, exp_avg_sq)
    # A spacing a step where the parameters were largest, and what the moments lost, over beta each time.
    bound = count * EPSILON[param_type] * (start.abs().double() + count * LR) + LR * 1e-5
    assert_close(params, start, bound, "params")
    assert not exp_avg.any() and not exp_avg_sq.any(), "before the first step the moments are zero"


def test_a_moment_that_rounding_swallowed_does_not_make_the_next_step_huge(op):
    numel = 10_001
    small, large, none = torch.full((numel,), 1e-5), torch.linspace(100, 1000, numel), torch.zeros(numel)
    params, exp_avg, exp_avg_sq = torch.ones(numel), torch.zeros(numel), torch.zeros(numel)
    with adam(op):
        op.adam_update(ID, 1, *HYPER, params, small, exp_avg, exp_avg_sq)
        op.adam_update(ID, 2, *HYPER, params, large, exp_avg, exp_avg_sq)
        op.adam_rollback(ID, 2, *HYPER, params, large, exp_avg, exp_avg_sq)
        before = params.clone()
        op.adam_update(ID, 2, *HYPER, params, none, exp_avg, exp_avg_sq)
    # exp_avg / sqrt(exp_avg_sq) never exceeds 7.3 with these betas; the second step decays it by 0.9 and
    # corrects it by sqrt(0.002) / 0.19. Decay of the parameters adds 0.1.
    assert ((params - before).abs() <= LR * (7.3 * 0.9 * 0.0447 / 0.19 + 0.1)).all()


def test_a_beta_of_zero_leaves_no_trace_to_go_back_to(op):
    params, grads, exp_avg, exp_avg_sq = make_inputs(100, (torch.float32,) * 4)
    start = params.clone()
    hyper = (LR, 0.0, 0.0, 1e-8, 0.0, False)
    with adam(op):
        op.adam_update(ID, 2, *hyper, params, grads, exp_avg, exp_avg_sq)
        op.adam_rollback(ID, 2, *hyper, params, grads, exp_avg, exp_avg_sq)
    assert not exp_avg.any() and not exp_avg_sq.any()
    torch.testing.assert_close(params, start, rtol=2 * SINGLE, atol=2 * SINGLE * LR)


def test_what_an_infinite_gradient_destroyed_stays_visible(op):
    params, grads, exp_avg, exp_avg_sq = make_inputs(100, (torch.float32,) * 4)
    grads[3] = float("inf")
    start = params.clone()
    with adam(op):
        op.adam_update(ID, 2, *HYPER, params, grads, exp_avg, exp_avg_sq)
        op.adam_rollback(ID, 2, *HYPER, params, grads, exp_avg, exp_avg_sq)
    assert params[3].isnan() and int(params.isnan().sum()) == 1
    finite = torch.arange(100) != 3
    torch.testing.assert_close(params[finite], start[finite], rtol=4 * SINGLE, atol=4 * SINGLE)


def test_arguments_are_checked_by_name(op):
    params, grads, exp_avg, exp_avg_sq = make_inputs(8, (torch.float32,) * 4)
    with adam(op):
        with pytest.raises(ValueError, match=r"step: expected 1 or more, got 0"):
            op.adam_rollback(ID, 0, *HYPER, params, grads, exp_avg, exp_avg_sq)
        with pytest.raises(ValueError, match=r"grads: expected 8 elements, got 7"):
            op.adam_rollback(ID, 1, *HYPER, params, grads[:7], exp_avg, exp_avg_sq)
        with pytest.raises(
            ValueError, match=r"weight_decay: expected lr \* weight_decay other than 1, got 4"
        ):
            op.adam_rollback(ID, 1, 0.25, 0.9, 0.9, 1e-8, 4.0, True, params, grads, exp_avg, exp_avg_sq)
    with pytest.raises(RuntimeError, match="optimizer_id: expected an id given to create_adam, got 7"):
        op.adam_rollback(ID, 1, *HYPER, params, grads, exp_avg, exp_avg_sq)
