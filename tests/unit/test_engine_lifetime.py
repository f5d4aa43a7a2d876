"""Engines come and go: several in one process, again over the same model, dropped without a word."""

import gc
import weakref

import pytest
import torch

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.small_engine import CASES, Weights, captured_log, ds_config, full_weights, run_micro_batch

pytestmark = pytest.mark.usefixtures("world_of_one")

NUMEL = 12
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))


def engine_over(model, case):
    return deepspeed.initialize(model=model, config=case.config())[0]


def train(engine, steps=2):
    for index in range(steps):
        run_micro_batch(engine, torch.linspace(-1, 1, NUMEL) * (index + 1))
    return full_weights(engine)


@EVERY_CASE
def test_after_destroy_the_model_is_an_ordinary_one(case):
    model = Weights(NUMEL)
    engine = engine_over(model, case)
    optimizer = engine.optimizer
    train(engine)
    engine.destroy()
    engine.destroy()
    assert engine.optimizer is None and engine.lr_scheduler is None and engine.memory_report() == []
    param = model.parts[0]
    model(torch.ones(NUMEL)).backward()
    assert param.grad is not None, "no hook takes it away"
    assert not [name for name in vars(param) if name.startswith(("_ds", "ds_"))]
    assert safe_get_full_fp32_param(param) is None, "though the client still holds the ZeRO optimizer"
    assert safe_get_full_grad(param) is param.grad
    assert optimizer.param_groups[0]["params"][0] is param, "the inner optimizer has its parameters again"
    torch.optim.SGD(model.parameters(), lr=1.0).step()


@EVERY_CASE
def test_a_model_can_be_initialized_again_after_destroy(case):
    model = Weights(NUMEL)
    first = engine_over(model, case)
    train(first)
    first.destroy()
    with torch.no_grad():
        model.parts[0].fill_(1.0)
    assert train(engine_over(model, case)) == train(engine_over(Weights(NUMEL), case))


def test_a_clients_optimizer_can_be_used_again_after_destroy():
    model = Weights(NUMEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(optimizer=None))[0]
        before = full_weights(engine)
        assert train(engine) != before
        engine.destroy()
    model(torch.ones(NUMEL)).backward()
    before = model.parts[0].detach().clone()
    optimizer.step()
    assert not torch.equal(model.parts[0], before)


@EVERY_CASE
def test_a_model_initialized_twice_is_trained_by_the_second_engine(case):
    model = Weights(NUMEL)
    first = engine_over(model, case)
    with captured_log() as log:
        second = engine_over(model, case)
    assert len([line for line in log if "parameters of another engine" in line]) == 1
    assert train(second) == train(engine_over(Weights(NUMEL), case))
    with pytest.raises(RuntimeError, match="step: expected gradients, got none"):
        first.step()
    first.destroy()
    assert train(second, 1) != [], "the second one goes on"
    assert second.was_step_applied()


def test_an_engine_for_evaluation_and_one_for_training_share_a_model():
    """TRL computes reference log-probabilities with an engine of its own over the same model, then trains."""
    model = Weights(NUMEL)
    config = ds_config(stage=0, offload=False, optimizer=None)
    reference = deepspeed.initialize(model=model, config=config)[0]
    with torch.no_grad():
        reference(torch.ones(NUMEL))
    with captured_log() as log:
        engine = engine_over(model, CASES[-1])
    train(engine)
    assert not [line for line in log if "another engine" in line]
    assert engine.global_steps == 2
    with torch.no_grad():
        assert reference(torch.ones(NUMEL)).item() == pytest.approx(model.parts[0].sum().item(), rel=1e-2)


@EVERY_CASE
def test_engines_of_one_process_do_not_touch_each_other(case):
    alone = train(engine_over(Weights(NUMEL), case), 3)
    policy, critic = engine_over(Weights(NUMEL), case), engine_over(Weights(NUMEL), CASES[0])
    losses = []
    for index in range(3):
        grad = torch.linspace(-1, 1, NUMEL) * (index + 1)
        losses = [policy(grad), critic(2 * grad)]
        critic.backward(losses[1])
        policy.backward(losses[0])
        critic.step()
        policy.step()
    assert full_weights(policy) == alone
    critic.destroy()
    run_micro_batch(policy, torch.ones(NUMEL))
    assert policy.global_steps == 4


@EVERY_CASE
def test_an_engine_dropped_without_destroy_is_collected_with_all_its_parts(case):
    model = Weights(NUMEL)
    engine = engine_over(model, case)
    train(engine)
    watched = [weakref.ref(thing) for thing in (engine, engine.optimizer, engine.optimizer.optimizer)]
    watched += [weakref.ref(group["params"][0]) for group in engine.optimizer.param_groups]
    del engine
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)
    param = model.parts[0]
    assert safe_get_full_fp32_param(param) is None
    model(torch.ones(NUMEL)).backward()
    assert param.grad is not None, "a hook of a dead engine does nothing"
    param.grad = None
    with captured_log() as log:
        again = engine_over(model, case)
    assert not [line for line in log if "another engine" in line]
    train(again)
    assert again.was_step_applied()


def test_a_loss_that_outlives_its_engine_keeps_no_memory():
    model = Weights(NUMEL)
    engine = engine_over(model, CASES[-1])
    loss = engine(torch.ones(NUMEL))
    engine.backward(loss)
    engine.step()
    optimizer = weakref.ref(engine.optimizer)
    engine.destroy()
    del engine
    gc.collect()
    assert optimizer() is None
    assert loss.item() == NUMEL
