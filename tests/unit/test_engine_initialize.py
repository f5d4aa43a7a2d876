"""`deepspeed.initialize` in every shape in which clients call it."""

import argparse
import functools
import json

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from tests.small_engine import CASES, Weights, ds_config, run_micro_batch

pytestmark = pytest.mark.usefixtures("world_of_one")

NUMEL = 12
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.01, "warmup_num_steps": 4}}


def trains(engine):
    """Whether one step changes the weights."""
    before = engine.module.parts[0].detach().clone()
    run_micro_batch(engine, torch.ones(NUMEL))
    return engine.was_step_applied() and not torch.equal(before, engine.module.parts[0])


def adamw(params):
    return torch.optim.AdamW(params, lr=0.1)


def constant(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def test_engine_optimizer_loader_and_scheduler_come_back_in_this_order():
    data = torch.utils.data.TensorDataset(torch.ones(4, NUMEL))
    returned = deepspeed.initialize(
        model=Weights(NUMEL), config=ds_config(scheduler=WARMUP), training_data=data
    )
    engine, optimizer, loader, scheduler = returned
    assert type(engine) is DeepSpeedEngine is deepspeed.DeepSpeedEngine
    assert engine.optimizer is optimizer
    assert isinstance(optimizer, (DeepSpeedOptimizer, DeepSpeedZeroOptimizer))
    assert engine.training_dataloader is loader and len(list(loader)) == 4
    assert engine.lr_scheduler is scheduler and isinstance(scheduler, WarmupLR)
    assert trains(engine)


def test_what_is_not_asked_for_is_none():
    _, _, loader, scheduler = deepspeed.initialize(model=Weights(NUMEL), config=ds_config())
    assert loader is None and scheduler is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_configured_optimizer_trains_at_every_stage_and_dtype(case):
    model = Weights(NUMEL)
    engine = deepspeed.initialize(model=model, config=case.config())[0]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    assert model.parts[0].dtype == dtype, "the model itself is cast"
    assert trains(engine)
    # Under fp16 the loss scale of 8 is taken out again.
    assert float(engine.get_global_grad_norm()) == pytest.approx(NUMEL**0.5, rel=1e-6)


# -- accelerate, transformers --------------------------------------------------------------------------------


def test_accelerate_passes_config_params_and_a_torch_optimizer():
    model = Weights(NUMEL)
    optimizer = adamw(model.parameters())
    config = ds_config(optimizer=None, zero_allow_untested_optimizer=True)
    engine, wrapped, _, _ = deepspeed.initialize(model=model, config_params=config, optimizer=optimizer)
    assert wrapped.optimizer is optimizer
    assert trains(engine)


def test_accelerate_passes_its_cpu_adam_with_the_groups_of_a_torch_optimizer():
    """Groups carry torch's own extra keys; the same dictionaries stay live in the engine."""
    model = Weights(NUMEL)
    groups = adamw(model.parameters()).param_groups
    optimizer = DeepSpeedCPUAdam(groups, lr=0.1, weight_decay=0.01, adamw_mode=True)
    engine = deepspeed.initialize(model=model, config_params=ds_config(optimizer=None), optimizer=optimizer)[
        0
    ]
    assert engine.optimizer.param_groups[0] is groups[0]
    groups[0]["lr"] = 0.0
    assert not trains(engine)
    groups[0]["lr"] = 0.1
    assert trains(engine)


def test_transformers_passes_trainable_parameters_and_a_callable_schedule():
    model = Weights(NUMEL)
    seen = []

    def make_scheduler(optimizer):
        seen.append(optimizer)
        return constant(optimizer)

    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model,
        model_parameters=[param for param in model.parameters() if param.requires_grad],
        lr_scheduler=make_scheduler,
        config_params=ds_config(),
    )
    assert isinstance(seen[0], torch.optim.Optimizer) and seen[0] is optimizer.optimizer
    assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
    assert trains(engine) and scheduler.last_epoch == 1, "the engine steps it"


def test_a_schedule_bound_to_the_clients_own_optimizer_stays_live():
    """accelerate and ms-swift step schedules of the optimizer that they passed, without the engine."""
    model = Weights(NUMEL)
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(optimizer=None))[0]
    run_micro_batch(engine, torch.ones(NUMEL))
    scheduler.step()
    assert engine.get_lr() == [0.05]
    assert engine.optimizer.param_groups[0]["lr"] == 0.05


# -- lightning -----------------------------------------------------------------------------------------------


def test_lightning_passes_a_namespace_a_generator_and_an_existing_process_group():
    deepspeed.init_distributed(verbose=False)
    model = Weights(NUMEL)
    optimizer = adamw(model.parameters())
    engine, returned, _, _ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=0),
        config=ds_config(optimizer=None),
        model=model,
        model_parameters=(param for param in model.parameters()),
        optimizer=optimizer,
        lr_scheduler=constant(optimizer),
        dist_init_required=False,
    )
    assert engine.optimizer is returned
    assert trains(engine)


def test_lightning_passes_a_plateau_schedule_and_takes_it_away_again():
    model = Weights(NUMEL)
    optimizer = adamw(model.parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    config = ds_config(optimizer=None)
    engine, _, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=plateau, config=config
    )
    assert scheduler is plateau
    engine.lr_scheduler = None
    assert trains(engine), "a plateau schedule cannot be stepped without a metric; the engine does not try"
    assert plateau.last_epoch == 0


@pytest.mark.parametrize(
    "config",
    [
        {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}},
        ds_config(dtype="bf16", optimizer=None, stage=0, offload=False),
        ds_config(dtype="bf16", optimizer=None),
    ],
    ids=["lightning-eval", "openrlhf-eval", "full-config-without-optimizer"],
)
def test_without_an_optimizer_the_engine_evaluates(config):
    model = Weights(NUMEL)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        args=None, config=config, model=model, optimizer=None, lr_scheduler=None, model_parameters=[]
    )
    assert optimizer is None and scheduler is None
    engine.eval()
    with torch.no_grad():
        assert engine(torch.ones(NUMEL)).item() == NUMEL
    assert model.parts[0].dtype == torch.bfloat16
    assert engine.skipped_steps == 0 and engine.get_global_grad_norm() is None


# -- OpenRLHF ------------------------------------------------------------------------------------------------


def test_openrlhf_passes_groups_a_partial_and_a_dict_as_args():
    deepspeed.init_distributed(verbose=False)
    model = Weights(NUMEL, 3)
    first, second = model.parameters()
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model,
        optimizer=None,
        model_parameters=[
            {"params": [first], "weight_decay": 0.1},
            {"params": [second], "weight_decay": 0.0},
        ],
        lr_scheduler=functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0),
        config=ds_config(zero_optimization={"stage": 2, "reduce_bucket_size": "auto"}),
        args={"local_rank": 0},
        dist_init_required=True,
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    run_micro_batch(engine, torch.ones(NUMEL + 3))
    assert engine.was_step_applied() and scheduler.last_epoch == 1


# -- frozen models of TRL and ms-swift -----------------------------------------------------------------------


def test_a_frozen_reference_model_may_keep_the_training_configuration():
    """ms-swift forces the stage to 0 and leaves optimizer, scheduler and offload in."""
    model = Weights(NUMEL).requires_grad_(False)
    config = ds_config(stage=0, offload=True, dtype="bf16", scheduler=WARMUP)
    engine, optimizer, _, scheduler = deepspeed.initialize(args=None, model=model, config=config)
    assert optimizer is None and scheduler is None
    engine.eval()
    assert engine(torch.ones(NUMEL)).item() == NUMEL


# -- the configuration ---------------------------------------------------------------------------------------


def test_the_configuration_may_be_a_path_json_text_or_named_by_args(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ds_config()))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    for arguments in (
        {"config": str(path)},
        {"config": path},
        {"config": json.dumps(ds_config())},
        {"args": args},
        {"args": {"deepspeed_config": str(path)}},
    ):
        assert trains(deepspeed.initialize(model=Weights(NUMEL), **arguments)[0]), arguments


def test_engine_config_is_the_mapping_as_it_was_passed():
    config = ds_config(steps_per_print=float("inf"))
    engine = deepspeed.initialize(model=Weights(NUMEL), config=config)[0]
    assert engine.config is config
    assert engine.config["zero_optimization"]["stage"] == 2 and engine.config.get("fp16") is None


def test_an_optimizer_may_be_a_callable():
    model = Weights(NUMEL)
    engine = deepspeed.initialize(model=model, optimizer=adamw, config=ds_config(optimizer=None))[0]
    assert type(engine.optimizer.optimizer) is torch.optim.AdamW
    assert trains(engine)


def test_initialize_makes_a_process_group_only_when_there_is_none():
    deepspeed.init_distributed(verbose=False)
    group = dist.group.WORLD
    deepspeed.initialize(model=Weights(NUMEL), config=ds_config())
    assert dist.group.WORLD is group
