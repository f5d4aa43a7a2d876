"""The dynamic loss scale: it follows overflows alike on every rank, down to its floor and no further."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import run_distributed
from tests.small_engine import CASES, captured_log, full_weights, make_engine, run_micro_batch

NUMEL = 16
FP16_CASES = [case for case in CASES if case.dtype == "fp16"]


def fp16(**keys):
    return {"fp16": {"enabled": True, "hysteresis": 1, "loss_scale_window": 2, **keys}}


def _scales(bad_steps, steps, keys):
    """The loss scale after each step, one list a case, and the log."""
    results = []
    for case in FP16_CASES:
        with captured_log() as log:
            engine = make_engine(case.config(**fp16(**keys)), NUMEL)
            scales = []
            for index in range(steps):
                grad = torch.ones(NUMEL)
                if index in bad_steps and dist.get_rank() == dist.get_world_size() - 1:
                    grad[-1] = math.inf
                run_micro_batch(engine, grad)
                scales.append(engine.cur_scale)
            engine.destroy()
        results.append((scales, log))
    return results


def test_scale_halves_on_overflow_doubles_after_clean_steps_and_each_change_is_logged():
    ranks = run_distributed(2, _scales, {0, 3}, 9, {"initial_scale_power": 4})
    for rank, results in enumerate(ranks):
        for scales, log in results:
            # Two clean steps fill the window, the third doubles the scale: stock's count is exclusive.
            assert scales == [8, 8, 8, 4, 4, 4, 8, 8, 16]
            changes = [line for line in log if "loss scale" in line and "->" in line]
            if rank == 0:
                assert ["16 -> 8" in changes[0], "8 -> 4" in changes[1], "4 -> 8" in changes[2]] == [True] * 3


def test_scale_stops_at_its_floor_with_one_error_on_every_rank():
    for errors in run_distributed(2, _overflow_for_ever, timeout_s=60.0):
        for scales, error in errors:
            assert scales == [8.0, 4.0], "16 halves to the floor of 4"
            assert error.startswith("RuntimeError: fp16.min_loss_scale: expected finite gradients")
            assert "got an overflow" in error and "use bf16" in error


def _overflow_for_ever():
    results = []
    for case in FP16_CASES:
        engine = make_engine(case.config(**fp16(initial_scale_power=4, min_loss_scale=4)), NUMEL)
        scales, error = [], ""
        for _ in range(5):
            try:
                run_micro_batch(engine, torch.full((NUMEL,), math.inf))
            except RuntimeError as raised:
                error = f"RuntimeError: {raised}"
                break
            scales.append(engine.cur_scale)
        engine.destroy()
        results.append((scales, error))
    return results


def test_a_scale_too_large_for_fp16_comes_down_until_steps_apply_with_the_true_norm():
    for results in run_distributed(2, _start_too_high):
        for applied, norm, weights in results:
            # 2^17 * 2 is inf in fp16 (largest 65504), 2^16 * 2 and 2^15 * 2 = 65536 too, 2^14 * 2 is not.
            assert applied == [False, False, False, True]
            # Exact: powers of two survive scaling and unscaling, sqrt(16 * 4) = 8.
            assert norm == 8.0
            assert all(weight < 1.0 for weight in weights)


def _start_too_high():
    results = []
    for case in FP16_CASES:
        engine = make_engine(case.config(**fp16(initial_scale_power=17)), NUMEL)
        applied = []
        for _ in range(4):
            run_micro_batch(engine, torch.full((NUMEL,), 2.0))
            applied.append(engine.was_step_applied())
        results.append((applied, float(engine.get_global_grad_norm()), full_weights(engine)))
        engine.destroy()
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_after_the_error_at_the_floor_a_finite_step_still_works(world):
    """The error is for the user to act on, say by leaving a bad sample out; nothing is left half-way."""
    for results in run_distributed(world, _recover_after_floor, timeout_s=60.0):
        for norm, weights in results:
            assert norm == 4.0, "the gradient of the failed step is not in it"
            assert all(weight < 1.0 for weight in weights)


def _recover_after_floor():
    results = []
    for case in FP16_CASES:
        engine = make_engine(case.config(**fp16(initial_scale_power=0, min_loss_scale=1)), NUMEL)
        with pytest.raises(RuntimeError, match=r"fp16\.min_loss_scale"):
            run_micro_batch(engine, torch.full((NUMEL,), math.inf))
        run_micro_batch(engine, torch.ones(NUMEL))
        results.append((float(engine.get_global_grad_norm()), full_weights(engine)))
        engine.destroy()
    return results
