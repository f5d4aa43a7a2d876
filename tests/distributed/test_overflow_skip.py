"""A gradient that is not finite: the step is skipped on every rank, counted, logged, and leaves no trace."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import run_distributed
from tests.small_engine import CASES, captured_log, full_weights, make_engine, run_micro_batch

NUMEL = 16
IN_LAST_SHARD = NUMEL - 1  # an element that at stages 1 and 2 the last rank alone owns
LIMIT_S = 60.0  # a rank that waits for another which has skipped would wait for ever

pytestmark = pytest.mark.parametrize("world", [1, 2])


class Facts(NamedTuple):
    """What is visible after a step."""

    applied: bool
    overflow: bool
    skipped: int
    global_steps: int
    norm: float
    lr: float
    inner_step: int  # as the inner optimizer counts
    weights: list


def gradient(index, bad=None):
    """A gradient of its own for each step; with `bad`, the last rank puts that value into its own shard."""
    values = torch.linspace(0.25, 1.0, NUMEL) * (index + 1)
    if bad is not None and dist.get_rank() == dist.get_world_size() - 1:
        values[IN_LAST_SHARD] = bad
    return values


def inner_step(optimizer):
    states = [state["step"] for state in optimizer.state.values() if "step" in state]
    return int(states[0]) if states else 0


def train(config, bad_steps, steps):
    """Steps 0, 1, ... with the gradient's bad value of `bad_steps[step]`, if any."""
    engine = make_engine(config, NUMEL)
    facts = []
    for index in range(steps):
        run_micro_batch(engine, gradient(index, bad_steps.get(index)))
        facts.append(
            Facts(
                engine.was_step_applied(),
                engine.optimizer.overflow,
                engine.skipped_steps,
                engine.global_steps,
                float(engine.get_global_grad_norm()),
                engine.get_lr()[0],
                inner_step(engine.optimizer),
                full_weights(engine),
            )
        )
    engine.destroy()
    return facts


def train_each(bad_steps, steps, keys):
    return [train(case.config(**keys), bad_steps, steps) for case in CASES]


def _all_ranks(world, fn, *args):
    """What a function returned, the same on every rank."""
    results = run_distributed(world, fn, *args, timeout_s=LIMIT_S)
    # repr: a norm that is nan is the same fact as another nan.
    assert all(repr(result) == repr(results[0]) for result in results), "ranks see different steps"
    return results[0]


def test_one_ranks_nonfinite_gradient_skips_the_step_on_every_rank(world):
    bad = {1: math.inf, 3: math.nan, 4: -math.inf}
    for case, facts in zip(CASES, _all_ranks(world, train_each, bad, 6, {}), strict=True):
        assert [step.applied for step in facts] == [True, False, True, False, False, True], case
        assert [step.overflow for step in facts] == [False, True, False, True, True, False], case
        assert [step.skipped for step in facts] == [0, 1, 1, 2, 3, 3], case
        assert [step.global_steps for step in facts] == [1, 2, 3, 4, 5, 6], (
            "attempted steps count, as in stock"
        )
        assert [step.inner_step for step in facts] == [1, 1, 2, 2, 2, 3], case
        assert [math.isfinite(step.norm) for step in facts] == [step.applied for step in facts], case
        for index in bad:
            assert facts[index].weights == facts[index - 1].weights, case


def test_a_skipped_step_leaves_no_trace_in_later_ones(world):
    with_bad = _all_ranks(world, train_each, {1: math.inf, 2: math.nan}, 5, {})
    clean = _all_ranks(world, _train_without, {1, 2}, 5)
    for case, facts, reference in zip(CASES, with_bad, clean, strict=True):
        assert facts[-1].weights == reference, f"{case}: bitwise, as the arithmetic is the same"


def _train_without(left_out, steps):
    results = []
    for case in CASES:
        engine = make_engine(case.config(), NUMEL)
        for index in range(steps):
            if index not in left_out:
                run_micro_batch(engine, gradient(index))
        results.append(full_weights(engine))
        engine.destroy()
    return results


def test_when_every_step_is_bad_nothing_moves_and_each_skip_is_logged_with_its_count(world):
    for case, (facts, log) in zip(CASES, run_distributed(world, _train_always_bad)[0], strict=True):
        assert [step.skipped for step in facts] == [1, 2, 3], case
        assert facts[-1].weights == [1.0] * NUMEL, case
        skips = [line for line in log if "step skipped" in line and "not finite" in line]
        assert [line.split(";")[-1].strip() for line in skips] == [
            f"{n} skipped so far" for n in (1, 2, 3)
        ], log


def _train_always_bad():
    results = []
    for case in CASES:
        with captured_log() as log:
            facts = train(case.config(), dict.fromkeys(range(3), math.inf), 3)
        results.append((facts, log))
    return results


def test_the_schedule_advances_only_with_the_optimizer(world):
    schedule = {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"},
    }
    bad = dict.fromkeys((0, 2, 3), math.inf)
    with_bad = _all_ranks(world, train_each, bad, 7, {"scheduler": schedule})
    clean = _all_ranks(world, train_each, {}, 4, {"scheduler": schedule})
    for case, facts, reference in zip(CASES, with_bad, clean, strict=True):
        assert [step.lr for step in facts if step.applied] == [step.lr for step in reference], case
        for before, after in zip(facts, facts[1:], strict=False):
            assert after.applied or after.lr == before.lr, case


def test_a_nonfinite_micro_batch_spoils_the_whole_accumulated_step(world):
    for case, (applied, weights) in zip(CASES, _all_ranks(world, _accumulate_with_inf), strict=True):
        assert applied == [False, True], case
        assert weights[0] == [1.0] * NUMEL, case
        assert weights[1] != weights[0], case


def _accumulate_with_inf():
    """Two steps of two micro-batches. In the first step inf meets -inf, so that only nan remains of it."""
    results = []
    for case in CASES:
        engine = make_engine(case.config(gradient_accumulation_steps=2), NUMEL)
        applied, weights = [], []
        for bads in ((math.inf, -math.inf), (None, None)):
            for bad in bads:
                run_micro_batch(engine, gradient(0, bad))
            applied.append(engine.was_step_applied())
            weights.append(full_weights(engine))
        engine.destroy()
        results.append((applied, weights))
    return results


def test_bf16_without_the_check_goes_on_as_asked(world):
    for facts in _all_ranks(world, _train_unchecked):
        assert [step.applied for step in facts] == [True, True]
        assert facts[1].skipped == 0
        assert math.isnan(facts[1].weights[IN_LAST_SHARD])
        assert all(math.isfinite(weight) for weight in facts[1].weights[:IN_LAST_SHARD])


def _train_unchecked():
    unchecked = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    return [train(case.config(**unchecked), {1: math.inf}, 2) for case in CASES if case.dtype == "bf16"]
