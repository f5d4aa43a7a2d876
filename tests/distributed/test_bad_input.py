"""Bad input: one clear error on every rank, the same words on each, and nobody waits for anybody."""

import os
import re

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.ops.op_builder import CPUAdamBuilder
from tests.distributed.harness import run_distributed
from tests.small_engine import Weights, ds_config, make_engine, run_micro_batch

NUMEL = 16
LIMIT_S = 60.0


class Muon(torch.optim.SGD):
    """Stands for an optimizer that needs whole matrices; known by its name."""


class Placeholder:
    """What integrations pass where the configuration's optimizer is meant: no step, no groups."""

    def __init__(self, params, lr=0.1):
        self.params, self.lr = list(params), lr


def zero(**keys):
    return {**ds_config()["zero_optimization"], **keys}


def from_config(**keys):
    return lambda: make_engine(ds_config(**keys), NUMEL)


def with_client(make_optimizer, **keys):
    def run():
        model = Weights(NUMEL)
        deepspeed.initialize(
            model=model, optimizer=make_optimizer(model.parameters()), config=ds_config(**keys)
        )

    return run


def step_without_backward():
    make_engine(ds_config(), NUMEL).step()


def step_twice_after_one_backward():
    engine = make_engine(ds_config(), NUMEL)
    run_micro_batch(engine, torch.ones(NUMEL))
    engine.step()


def detached_loss():
    engine = make_engine(ds_config(), NUMEL)
    with torch.no_grad():
        loss = engine(torch.ones(NUMEL))
    engine.backward(loss)


def loss_of_other_parameters():
    engine = make_engine(ds_config(), NUMEL)
    engine.backward(torch.ones(3, requires_grad=True).sum())
    engine.step()


def backward_without_optimizer():
    engine = make_engine(ds_config(optimizer=None), NUMEL)
    engine.backward(engine(torch.ones(NUMEL)))


def step_without_optimizer():
    make_engine(ds_config(optimizer=None), NUMEL).step()


def unused_parameter_that_must_be_used():
    engine = make_engine(ds_config(zero_optimization=zero(ignore_unused_parameters=False)), NUMEL, 3)
    engine.backward((engine.module.parts[0] * 2).sum())
    engine.step()


def step_with_closure():
    engine = make_engine(ds_config(), NUMEL)
    engine.optimizer.step(closure=lambda: None)


def another_group():
    engine = make_engine(ds_config(), NUMEL)
    engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def constant_rate(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def device_mesh():
    deepspeed.initialize(model=Weights(NUMEL), config=ds_config(), mesh_param=(2, 1))


AUTO = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}

# What is done -> the error's type and what its text must hold, in order.
CASES = {
    "unknown key": (
        from_config(gradient_cliping=1.0),
        "DeepSpeedConfigError",
        ["gradient_cliping", "gradient_clipping"],
    ),
    "unknown key of a section": (
        from_config(zero_optimization=zero(reduce_bucket_sise=5)),
        "DeepSpeedConfigError",
        ["zero_optimization.reduce_bucket_sise", "reduce_bucket_size"],
    ),
    "batch triangle": (
        from_config(train_batch_size=7, gradient_accumulation_steps=2),
        "DeepSpeedConfigError",
        ["train_batch_size", "expected", "= 1 * 2 * 2 = 4", "got 7"],
    ),
    "no batch size": (
        from_config(train_micro_batch_size_per_gpu=None),
        "DeepSpeedConfigError",
        ["train_batch_size or train_micro_batch_size_per_gpu", "expected"],
    ),
    "stage 3": (from_config(stage=3), "NotImplementedError", ["zero_optimization.stage", "got 3"]),
    "NVMe": (
        from_config(zero_optimization=zero(offload_optimizer={"device": "nvme"})),
        "NotImplementedError",
        ["zero_optimization.offload_optimizer.device", "nvme"],
    ),
    "NaN loss scale": (
        from_config(fp16={"enabled": True, "loss_scale": float("nan")}),
        "DeepSpeedConfigError",
        ["fp16.loss_scale", "expected a finite number", "got nan"],
    ),
    "negative loss scale": (
        from_config(fp16={"enabled": True, "loss_scale": -1}),
        "DeepSpeedConfigError",
        ["fp16.loss_scale", "expected", "got -1"],
    ),
    "two precisions": (
        from_config(fp16={"enabled": True}, bf16={"enabled": True}),
        "DeepSpeedConfigError",
        ["fp16.enabled", "bf16.enabled"],
    ),
    "auto": (
        from_config(optimizer=AUTO, gradient_clipping="auto"),
        "DeepSpeedConfigError",
        ["gradient_clipping", "optimizer.params.lr", "optimizer.params.betas", "got", "auto"],
    ),
    "no configuration": (
        lambda: deepspeed.initialize(model=Weights(NUMEL)),
        "DeepSpeedConfigError",
        ["config: expected", "got None"],
    ),
    "two configurations": (
        lambda: deepspeed.initialize(
            model=Weights(NUMEL), config=ds_config(), config_params=ds_config(stage=1)
        ),
        "DeepSpeedConfigError",
        ["config and config_params: expected one configuration"],
    ),
    "no module": (
        lambda: deepspeed.initialize(model=[1], config=ds_config()),
        "ValueError",
        ["model: expected a torch.nn.Module, got list"],
    ),
    "no model": (
        lambda: deepspeed.initialize(config=ds_config()),
        "ValueError",
        ["model: expected a torch.nn.Module, got NoneType"],
    ),
    "device mesh": (device_mesh, "NotImplementedError", ["mesh_param: expected None"]),
    "whole-matrix optimizer": (
        with_client(Muon),
        "ValueError",
        ["optimizer: expected an elementwise optimizer, got Muon", "whole matrices"],
    ),
    "named whole-matrix optimizer": (
        from_config(optimizer={"type": "Lamb", "params": {"lr": 0.1}}),
        "NotImplementedError",
        ["optimizer.type: expected an elementwise optimizer, got Lamb"],
    ),
    "unknown optimizer": (
        from_config(optimizer={"type": "Adamm", "params": {"lr": 0.1}}),
        "ValueError",
        ["optimizer.type: expected", "got 'Adamm'"],
    ),
    "unknown optimizer setting": (
        from_config(optimizer={"type": "AdamW", "params": {"learning_rate": 0.1}}),
        "ValueError",
        ["optimizer.params.learning_rate"],
    ),
    "placeholder optimizer": (
        with_client(Placeholder),
        "ValueError",
        [
            "optimizer: expected a torch.optim.Optimizer, got Placeholder",
            "optimizer.type is AdamW",
            "optimizer=None",
        ],
    ),
    "scheduler without optimizer": (
        from_config(optimizer=None, scheduler={"type": "WarmupLR", "params": {}}),
        "ValueError",
        ["scheduler.type: expected an optimizer to schedule, got 'WarmupLR' without one"],
    ),
    "callable schedule without optimizer": (
        lambda: make_engine(ds_config(optimizer=None), NUMEL, lr_scheduler=constant_rate),
        "ValueError",
        ["lr_scheduler: expected an optimizer to schedule", "without one"],
    ),
    "unknown scheduler": (
        from_config(scheduler={"type": "WarmUp", "params": {}}),
        "ValueError",
        ["scheduler.type: expected", "got 'WarmUp'"],
    ),
    "step without backward": (
        step_without_backward,
        "RuntimeError",
        ["step: expected gradients, got none on any rank", "Call engine.backward(loss)"],
    ),
    "second step": (step_twice_after_one_backward, "RuntimeError", ["step: expected gradients, got none"]),
    "detached loss": (
        detached_loss,
        "RuntimeError",
        ["backward: expected a loss that depends on parameters"],
    ),
    "loss of other parameters": (
        loss_of_other_parameters,
        "RuntimeError",
        ["step: expected gradients, got none"],
    ),
    "backward without optimizer": (
        backward_without_optimizer,
        "RuntimeError",
        ["backward: expected an optimizer, got none"],
    ),
    "step without optimizer": (
        step_without_optimizer,
        "RuntimeError",
        ["step: expected an optimizer, got none"],
    ),
    "unused parameter": (
        unused_parameter_that_must_be_used,
        "RuntimeError",
        ["zero_optimization.ignore_unused_parameters: expected a gradient", "['parts.1']"],
    ),
    "closure": (step_with_closure, "NotImplementedError", ["step: expected no closure"]),
    "another group": (
        another_group,
        "NotImplementedError",
        ["add_param_group: expected all parameter groups"],
    ),
}


def _errors():
    """What each case raises, in turn; all ranks take the same turns, so one that waits for another hangs."""
    found = {}
    for name, (run, _, _) in CASES.items():
        try:
            run()
            found[name] = "no error"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def errors():
    """For each case what every rank raised; world 2."""
    ranks = run_distributed(2, _errors, timeout_s=LIMIT_S)
    return {name: [rank[name] for rank in ranks] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_raises_the_same_clear_error(errors, name):
    _, kind, words = CASES[name]
    first, second = errors[name]
    assert first == second
    assert first.startswith(f"{kind}: "), first
    assert re.search(".*".join(map(re.escape, words)), first, re.DOTALL), first
    assert len(first) < 1000, "one clear error, not a dump"


def _unused_on_the_last_rank_only():
    engine = make_engine(ds_config(zero_optimization=zero(ignore_unused_parameters=False)), NUMEL, 3)
    first, second = engine.module.parts
    last = dist.get_rank() == dist.get_world_size() - 1
    engine.backward((first * 2).sum() + (0 if last else second.sum()))
    with pytest.raises(RuntimeError, match="ignore_unused_parameters") as raised:
        engine.step()
    dist.barrier()
    return str(raised.value)


def test_what_is_wrong_on_one_rank_is_raised_on_every_rank():
    first, second = run_distributed(2, _unused_on_the_last_rank_only, timeout_s=LIMIT_S)
    assert "got none for parameters of other ranks" in first
    assert "got none for ['parts.1']" in second


def _after_an_error():
    with pytest.raises(NotImplementedError, match=r"zero_optimization\.stage"):
        make_engine(ds_config(stage=3), NUMEL)
    engine = make_engine(ds_config(), NUMEL)
    with pytest.raises(RuntimeError, match="step: expected gradients"):
        engine.step()
    run_micro_batch(engine, torch.ones(NUMEL))
    return engine.was_step_applied(), float(engine.get_global_grad_norm())


def test_after_an_error_the_process_can_go_on():
    assert run_distributed(2, _after_an_error) == [(True, 4.0)] * 2


def _no_compiler():
    CPUAdamBuilder.is_prebuilt = lambda self: False
    errors = []
    for stage in (1, 2):
        try:
            make_engine(ds_config(stage=stage), NUMEL)
        except RuntimeError as error:
            errors.append(str(error))
    # Without offload the op is not needed.
    run_micro_batch(make_engine(ds_config(offload=False), NUMEL), torch.ones(NUMEL))
    return errors


@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler"])
def test_a_missing_compiler_is_one_clear_error_on_every_rank_and_only_under_offload(tmp_path, compiler):
    env = {"CXX": compiler, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    for errors in run_distributed(2, _no_compiler, env=env, timeout_s=LIMIT_S):
        assert len(errors) == 2
        for error in errors:
            assert compiler in error and "expected" in error and "Install g++" in error
            assert len(error.splitlines()) <= 4, "the first error, not the whole build"
    assert not [name for name in os.listdir(tmp_path) if not name.endswith(".lock")], (
        "no half-built op is left"
    )
