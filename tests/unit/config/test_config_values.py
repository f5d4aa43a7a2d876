"""Defaults are stock DeepSpeed 0.19.8's, and values arrive in every form that clients send."""

import pytest
import torch

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum


def config(**keys):
    return DeepSpeedConfig({"train_batch_size": 4, **keys})


def zero(**keys):
    return config(zero_optimization=keys).zero_optimization


def test_defaults_are_those_of_stock():
    made = config()
    assert (made.gradient_clipping, made.steps_per_print, made.communication_data_type) == (1.0, None, None)
    assert (made.prescale_gradients, made.gradient_predivide_factor) == (False, 1.0)
    assert (made.zero_allow_untested_optimizer, made.zero_force_ds_cpu_optimizer) == (False, True)
    assert (made.wall_clock_breakdown, made.memory_breakdown, made.dump_state) == (False, False, False)
    assert (made.optimizer, made.scheduler, made.dataloader_drop_last) == (None, None, False)
    assert made.checkpoint.tag_validation == "WARN"
    assert made.data_types.grad_accum_dtype is None
    assert made.bf16.check_grad_overflow
    assert made.dtype == torch.float32


def test_zero_defaults_are_those_of_stock():
    made = zero()
    assert made.stage == 0
    assert (made.reduce_bucket_numel, made.allgather_bucket_numel) == (500_000_000, 500_000_000)
    assert (made.ignore_unused_parameters, made.round_robin_gradients, made.overlap_comm) == (
        True,
        False,
        None,
    )
    assert (made.offload_optimizer, made.offload_param) == (None, None)
    assert zero(offload_optimizer={}).offload_optimizer.pin_memory
    assert zero(offload_optimizer={}).offload_optimizer.device is OffloadDeviceEnum.none


def test_fp16_defaults_are_those_of_stock():
    fp16 = config(fp16={"enabled": True}).fp16
    assert (fp16.loss_scale, fp16.initial_scale_power, fp16.loss_scale_window) == (0, 16, 1000)
    assert (fp16.hysteresis, fp16.consecutive_hysteresis, fp16.min_loss_scale) == (2, False, 1)
    assert fp16.dynamic_loss_scale
    assert fp16.initial_loss_scale == 65536
    assert not fp16.auto_cast


def test_a_fixed_loss_scale_is_not_dynamic():
    fp16 = config(fp16={"enabled": True, "loss_scale": 128}).fp16
    assert not fp16.dynamic_loss_scale
    assert fp16.initial_loss_scale == 128


def test_default_clipping_can_be_told_from_the_users():
    assert config().gradient_clipping_is_default
    for value in (0, 0.0, 1.0):
        made = config(gradient_clipping=value)
        assert not made.gradient_clipping_is_default
        assert made.gradient_clipping == value


@pytest.mark.parametrize("key", ["bf16", "bfloat16"])
def test_bf16_has_two_spellings(key):
    assert config(**{key: {"enabled": True}}).dtype == torch.bfloat16


def test_fp16_decides_the_weights_dtype():
    assert config(fp16={"enabled": True, "auto_cast": True}, bf16={"enabled": False}).dtype == torch.float16


@pytest.mark.parametrize("value", [500_000, 5e5, 500_000.0])
def test_bucket_sizes_are_whole_numbers_of_elements_however_written(value):
    made = zero(reduce_bucket_size=value, allgather_bucket_size=value)
    assert (made.reduce_bucket_numel, made.allgather_bucket_numel) == (500_000, 500_000)
    assert isinstance(made.reduce_bucket_numel, int)


@pytest.mark.parametrize("spelling", ["cpu", "CPU", "Cpu", OffloadDeviceEnum.cpu])
def test_offload_device_is_read_in_any_letter_case(spelling):
    assert zero(stage=2, offload_optimizer={"device": spelling}).offloads_optimizer


@pytest.mark.parametrize("spelling", ["none", "NONE", "None"])
def test_offload_device_none_in_any_letter_case_is_no_offload(spelling):
    made = zero(stage=2, offload_optimizer={"device": spelling, "nvme_path": None})
    assert not made.offloads_optimizer
    assert not made.pins_staging


@pytest.mark.parametrize("pin", [True, False])
def test_pin_memory_is_honoured_only_where_something_is_offloaded(pin):
    offload = {"device": "cpu", "pin_memory": pin}
    assert zero(stage=1, offload_optimizer=offload).pins_staging is pin
    assert not zero(stage=0, offload_optimizer=offload).pins_staging


@pytest.mark.parametrize(("given", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_dtype_names_become_torch_dtypes(given, dtype):
    made = config(communication_data_type=given, data_types={"grad_accum_dtype": given})
    assert made.communication_data_type == made.data_types.grad_accum_dtype == dtype


def test_dtype_names_of_torch_are_read_too():
    assert config(communication_data_type="torch.float16").communication_data_type == torch.float16
    assert config(communication_data_type=torch.bfloat16).communication_data_type == torch.bfloat16


@pytest.mark.parametrize("value", [float("inf"), 10, 0, None, 1e9])
def test_steps_per_print_may_be_infinite_zero_or_null(value):
    assert config(steps_per_print=value).steps_per_print == value


def test_optimizer_and_scheduler_parameters_pass_through_untouched():
    params = {"lr": 1e-3, "betas": [0.9, 0.95], "torch_adam": True, "adam_w_mode": True}
    made = config(
        optimizer={"type": "AdamW", "params": params},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    )
    assert (made.optimizer.type, made.optimizer.params) == ("AdamW", params)
    assert (made.scheduler.type, made.scheduler.params) == ("WarmupLR", {"warmup_num_steps": 3})


@pytest.mark.parametrize(
    "section", ["optimizer", "scheduler", "zero_optimization", "fp16", "checkpoint", "data_types"]
)
def test_a_null_section_is_no_section(section):
    assert config(**{section: None}).model_dump() == config().model_dump()


def test_tag_validation_is_read_in_any_letter_case():
    assert config(checkpoint={"tag_validation": "Fail"}).checkpoint.tag_validation == "FAIL"


def test_old_forms_of_zero_optimization_mean_what_they_meant():
    assert config(zero_optimization=True).zero_optimization.stage == 1
    assert config(zero_optimization=False).zero_optimization.stage == 0
    old = zero(stage=2, cpu_offload=True, cpu_offload_use_pin_memory=False)
    assert old.offloads_optimizer
    assert not old.offload_optimizer.pin_memory
    assert not zero(stage=2, cpu_offload=False).offloads_optimizer


def test_stage_3_keys_have_two_spellings_and_no_effect():
    assert zero(prefetch_bucket_size=5) == zero(stage3_prefetch_bucket_size=5)
    assert zero(stage3_gather_fp16_weights_on_model_save=True).stage3_gather_16bit_weights_on_model_save


def test_two_spellings_that_disagree_are_an_error():
    with pytest.raises(DeepSpeedConfigError, match="bf16: expected the value of its other name bfloat16"):
        config(bf16={"enabled": True}, bfloat16={"enabled": False})


def test_dotted_top_level_keys_reach_their_section():
    made = DeepSpeedConfig(
        {
            "train_batch_size": 4,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "allgather_bucket_size": 9},
            "zero_optimization.reduce_bucket_size": 64,
            "zero_optimization.allgather_bucket_size": 65,
            "zero_optimization.stage3_param_persistence_threshold": 66,
        }
    ).zero_optimization
    assert (made.stage, made.reduce_bucket_numel) == (2, 64)
    assert made.allgather_bucket_numel == 9, "a value in the section wins over a dotted key"
    assert made.stage3_param_persistence_threshold == 66


@pytest.mark.parametrize("key", ["reduce_bucket_size", "allgather_bucket_size", "sub_group_size"])
def test_auto_in_a_size_takes_the_default(key):
    assert zero(stage=2, **{key: "auto"}) == zero(stage=2)


@pytest.mark.parametrize(
    "key",
    ["max_live_parameters", "max_reuse_distance", "param_persistence_threshold", "prefetch_bucket_size"],
)
def test_auto_in_a_stage_3_key_takes_the_default(key):
    assert zero(**{f"stage3_{key}": "auto"}) == zero(**{key: "auto"}) == zero()


def test_comment_keys_are_skipped_at_every_level():
    commented = config(_comment="why", fp16={"//": "off", "#": "", "enabled": False})
    assert commented.model_dump() == config(fp16={"enabled": False}).model_dump()


def test_keys_without_effect_are_told_in_one_sentence_each():
    made = config(
        disable_python_gc=True,
        log_level="info",
        activation_checkpointing={"partition_activations": True},
        zero_optimization={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    )
    for key in (
        "zero_optimization.offload_optimizer",
        "zero_optimization.offload_param",
        "disable_python_gc",
        "log_level",
        "activation_checkpointing.partition_activations",
    ):
        assert sum(notice.startswith(key) for notice in made.notices) == 1
    assert config(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}).notices == ()
