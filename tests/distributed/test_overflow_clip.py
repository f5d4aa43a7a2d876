"""Clipping and the reported norm: before clipping, of all ranks' gradients as they are at the step."""

import math

import pytest
import torch

from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from tests.distributed.harness import run_distributed
from tests.small_engine import CASES, captured_log, full_weights, make_engine, run_micro_batch

NUMELS = (5, 3, 9)  # the second and third parameter lie across the shards of two ranks
NUMEL = sum(NUMELS)
CLIP = 1e-3
SGD = {"type": "SGD", "params": {"lr": 1.0}}
# Adam's own scale invariance would hide clipping. With eps = 1 its first update is lr * g / (|g| + 1): the
# gradient itself for a gradient far below 1.
ADAM = {"type": "AdamW", "params": {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0}}

pytestmark = pytest.mark.parametrize("world", [1, 2])


def gradient():
    """Multiples of 1/4, exact in every dtype; their norm is sqrt(111.5625)."""
    return torch.arange(1.0, NUMEL + 1.0) / 4


NORM = gradient().double().norm().item()


def _updates(optimizer, keys):
    """For each case the update of one step and the reported norm."""
    results = []
    for case in CASES:
        engine = make_engine(
            case.config(optimizer=optimizer, zero_allow_untested_optimizer=True, **keys), *NUMELS
        )
        for _ in range(engine.gradient_accumulation_steps()):
            run_micro_batch(engine, gradient())
        update = [1.0 - weight for weight in full_weights(engine)]
        results.append(
            (case, torch.tensor(update, dtype=torch.float64), float(engine.get_global_grad_norm()))
        )
        engine.destroy()
    return results


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["any-optimizer", "fused-host-adam"])
def test_clipping_is_provable_and_the_reported_norm_is_the_one_before_it(world, optimizer):
    for results in run_distributed(world, _updates, optimizer, {"gradient_clipping": CLIP}):
        for case, update, norm in results:
            # fp32: 1e-6 relative for the sum of squares; the gradient itself is exact.
            assert math.isclose(norm, NORM, rel_tol=1e-6), case
            # Weights near 1 have a spacing of 6e-8, the update 1e-3 over 17 elements.
            assert abs(update.norm().item() - CLIP) < 1e-3 * CLIP + 17 * 6e-8, case
            torch.testing.assert_close(update, gradient().double() * (CLIP / NORM), rtol=2e-3, atol=1.2e-7)


def test_a_norm_below_the_limit_leaves_gradients_as_they_are(world):
    for results in run_distributed(world, _updates, SGD, {"gradient_clipping": 11.0}):
        for case, update, _ in results:
            assert update.tolist() == gradient().tolist(), f"{case}: bitwise, quarters are exact"


def test_the_norm_of_accumulated_micro_batches_is_that_of_their_mean(world):
    """Every micro-batch counts, not only the first; the mean of equal gradients is the gradient."""
    keys = {"gradient_accumulation_steps": 4, "gradient_clipping": 0.0}
    for results in run_distributed(world, _updates, SGD, keys):
        for case, update, norm in results:
            assert math.isclose(norm, NORM, rel_tol=1e-6), case
            assert update.tolist() == gradient().tolist(), case


def test_without_a_setting_clipping_is_at_1_and_the_log_says_so(world):
    for results, log in run_distributed(world, _with_log, {"gradient_clipping": None})[:1]:
        for case, update, norm in results:
            assert math.isclose(norm, NORM, rel_tol=1e-6), case
            assert abs(update.norm().item() - 1.0) < 1e-5, case
        lines = [line for line in log if "clipping=1 (the default" in line]
        assert len(lines) == len(CASES), log


def test_clipping_switched_off_is_off_and_the_log_says_so(world):
    for results, log in run_distributed(world, _with_log, {"gradient_clipping": 0.0})[:1]:
        for case, update, _ in results:
            assert update.tolist() == gradient().tolist(), case
        assert sum("clipping=0" in line and "default" not in line for line in log) == len(CASES), log


def _with_log(keys):
    with captured_log() as log:
        return _updates(SGD, keys), log


def test_gradients_edited_with_the_safe_setters_count_in_norm_clipping_and_update(world):
    for results in run_distributed(world, _edit_all_gradients):
        for case, seen, norm, update in results:
            expected = 0.0078125 * math.sqrt(NUMEL)  # 2 ** -7, exact in every dtype
            assert seen == [0.0078125] * NUMEL, case
            assert math.isclose(norm, expected, rel_tol=1e-6), case
            factor = CLIP / (expected + 1e-6)  # stock's and torch's constant
            # The spacing of floats below 1 is 6e-8.
            assert max(abs(step - 0.0078125 * factor) for step in update) < 1.2e-7, case


def _edit_all_gradients():
    results = []
    for case in CASES:
        config = case.config(optimizer=SGD, zero_allow_untested_optimizer=True, gradient_clipping=CLIP)
        engine = make_engine(config, *NUMELS)
        engine.backward(engine(gradient()))
        params = list(engine.module.parameters())
        for param in params:
            safe_set_full_grad(param, torch.full_like(param, 0.0078125, dtype=torch.float32))
        seen = torch.cat([safe_get_full_grad(param) for param in params]).tolist()
        engine.step()
        update = [1.0 - weight for weight in full_weights(engine)]
        results.append((case, seen, float(engine.get_global_grad_norm()), update))
        engine.destroy()
    return results


def test_a_gradient_made_finite_with_a_safe_setter_lets_the_step_through(world):
    for results in run_distributed(world, _repair_gradient):
        for case, applied, norm in results:
            assert applied, case
            # Nine ones, and zeros elsewhere; 1e-12: the root of a sum of two ranks' squares.
            assert math.isclose(norm, 3.0, rel_tol=1e-12), case


def _repair_gradient():
    results = []
    for case in CASES:
        engine = make_engine(case.config(), *NUMELS)
        grad = torch.zeros(NUMEL)
        grad[5], grad[8:] = math.nan, 1.0
        engine.backward(engine(grad))
        second = list(engine.module.parameters())[1]
        safe_set_full_grad(second, torch.zeros(3))
        engine.step()
        results.append((case, engine.was_step_applied(), float(engine.get_global_grad_norm())))
        engine.destroy()
    return results
