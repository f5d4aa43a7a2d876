"""Everything that is wrong is reported in one error, by full key path, with value and remedy."""

import pytest

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError


def message(**keys):
    with pytest.raises(DeepSpeedConfigError) as error:
        DeepSpeedConfig({"train_batch_size": 4, **keys})
    return str(error.value)


@pytest.mark.parametrize(
    ("keys", "path", "nearest"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping", "gradient_clipping"),
        ({"zero_optimisation": {}}, "zero_optimisation", "zero_optimization"),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge", "zero_optimization.stage"),
        (
            {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}},
            "zero_optimization.offload_optimizer.devise",
            "zero_optimization.offload_optimizer.device",
        ),
        (
            {"offload_optimizer": {"device": "cpu"}},
            "offload_optimizer",
            "zero_optimization.offload_optimizer",
        ),
        ({"optimizer": {"type": "Adam", "paramz": {}}}, "optimizer.paramz", "optimizer.params"),
        ({"flops_profiler": {"enabledd": True}}, "flops_profiler.enabledd", "flops_profiler.enabled"),
        (
            {"zero_optimization": {"reduce_bucket_numel": 5}},
            "zero_optimization.reduce_bucket_numel",
            "reduce_bucket_size",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(keys, path, nearest):
    text = message(**keys)
    assert text.startswith(f"{path}: expected a known key")
    assert nearest in text


def test_a_key_like_no_other_still_names_a_known_one():
    assert "The nearest known key is" in message(qqq=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1, "dynamic", None, True])
def test_a_loss_scale_that_cannot_be_one_is_refused_by_name(value):
    text = message(fp16={"enabled": True, "loss_scale": value})
    assert text.startswith("fp16.loss_scale: expected")
    assert "Use 0 for a dynamic loss scale" in text


@pytest.mark.parametrize("value", [None, -1, "1.0", float("nan"), float("inf"), True])
def test_a_clipping_that_cannot_be_one_says_how_to_switch_it_off(value):
    assert "Use 0.0 for no clipping" in message(gradient_clipping=value)


@pytest.mark.parametrize("stage", [4, -1, "two", 1.5, True, None])
def test_a_stage_that_does_not_exist_is_named(stage):
    assert message(zero_optimization={"stage": stage}).startswith(
        "zero_optimization.stage: expected 0, 1 or 2"
    )


@pytest.mark.parametrize(
    ("keys", "start"),
    [
        (
            {"zero_optimization": {"reduce_bucket_size": 0}},
            "zero_optimization.reduce_bucket_size: expected a number > 0",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": 1.5}},
            "zero_optimization.reduce_bucket_size: expected a whole",
        ),
        (
            {"zero_optimization": {"overlap_comm": "maybe"}},
            "zero_optimization.overlap_comm: expected true or false",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "disk"}}},
            'zero_optimization.offload_optimizer.device: expected "none" or "cpu", got \'disk\'',
        ),
        ({"zero_optimization": 2}, "zero_optimization: expected a JSON object, got 2"),
        ({"fp16": {"initial_scale_power": 400}}, "fp16.initial_scale_power: expected a number <= 127"),
        (
            {"communication_data_type": "fp8"},
            'communication_data_type: expected one of "fp32", "fp16", "bf16"',
        ),
        ({"data_types": {"grad_accum_dtype": "int8"}}, "data_types.grad_accum_dtype: expected one of"),
        ({"steps_per_print": -1}, "steps_per_print: expected a number >= 0"),
        ({"log_level": "chatty"}, "log_level: expected one of debug, info"),
        ({"checkpoint": {"tag_validation": "shout"}}, "checkpoint.tag_validation: expected one of 'WARN'"),
        ({"optimizer": {"params": {}}}, "optimizer.type: expected a value, got nothing"),
        ({"scheduler": {"type": 3}}, "scheduler.type: expected a string, got 3"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor: expected a number > 0"),
        ({"data_parallel_size": 2}, "data_parallel_size: expected the world size 1, got 2"),
    ],
)
def test_a_wrong_value_is_reported_by_path_with_what_was_expected(keys, start):
    assert message(**keys).startswith(start)


def test_two_precisions_at_once_are_a_contradiction():
    text = message(fp16={"enabled": True}, bf16={"enabled": True})
    assert text.startswith("fp16.enabled, bf16.enabled: expected at most one")


def test_max_grad_norm_in_the_optimizer_points_to_gradient_clipping():
    text = message(optimizer={"type": "Adam", "params": {"max_grad_norm": 1.0}})
    assert text.startswith("optimizer.params.max_grad_norm: expected no such parameter")
    assert "gradient_clipping" in text


def test_every_leftover_auto_is_listed_in_one_error():
    text = message(
        train_micro_batch_size_per_gpu="auto",
        gradient_clipping="auto",
        optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": ["auto", 0.9], "eps": 1e-8}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        bf16={"enabled": "auto"},
        zero_optimization={
            "stage": "auto",
            "reduce_bucket_size": "auto",
            "offload_optimizer": {"device": "auto"},
        },
    )
    keys = text.split(": expected a value, got 'auto'")[0].split(", ")
    assert sorted(keys) == [
        "bf16.enabled",
        "gradient_clipping",
        "optimizer.params.betas",
        "optimizer.params.lr",
        "scheduler.params.warmup_num_steps",
        "train_micro_batch_size_per_gpu",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.stage",
    ]
    assert "\n" not in text, "nothing else is wrong"


def test_all_problems_come_in_one_error():
    text = message(
        train_batch_size=5,
        train_micro_batch_size_per_gpu=2,
        fp16={"loss_scale": float("nan"), "hysteresys": 1},
        zero_optimization={"stage": 3, "reduce_bucket_size": "auto"},
        gradient_clipping="auto",
        amp={"enabled": True},
    )
    lines = [line.strip().partition(":")[0] for line in text.splitlines()]
    assert lines == [
        "DeepSpeed config",
        "fp16.hysteresys",
        "gradient_clipping",
        "fp16.loss_scale",
        "train_batch_size",
        "amp.enabled",
        "zero_optimization.stage",
    ]


def test_a_long_value_does_not_drown_the_message():
    assert len(message(gradient_clipping="x" * 10_000)) < 300
