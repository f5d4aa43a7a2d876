"""Smaller forms of the state: whose key asks for what, and where one is refused."""

import pytest
import torch

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.config_forms import accumulation_dtype, state_forms
from deepspeed.runtime.zero.forms import MasterForm, MomentForm, StateForms

OFFLOAD = "zero_optimization.offload_optimizer"


def config(offload=None, device="cpu", stage=2, bf16=True, **keys):
    return {
        "train_batch_size": 1,
        "bf16": {"enabled": bf16, **keys.pop("bf16_keys", {})},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": device, **(offload or {})}},
        **keys,
    }


def test_the_default_is_exact():
    parsed = DeepSpeedConfig(config())
    assert state_forms(parsed) == StateForms() and state_forms(parsed).are_default
    assert accumulation_dtype(parsed) is None


@pytest.mark.parametrize("moments", list(MomentForm))
@pytest.mark.parametrize("master", list(MasterForm))
def test_our_keys_combine(master, moments):
    keys = {
        "master_weights": master.value.upper(),
        "optimizer_states": moments.value,
        "optimizer_states_seed": 5,
    }
    assert state_forms(DeepSpeedConfig(config(keys))) == StateForms(master, moments, 5)


def test_stocks_keys_are_the_same_bytes():
    stock = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    parsed = DeepSpeedConfig(config(bf16_keys=stock))
    assert state_forms(parsed) == StateForms(MasterForm.bf16_residual, MomentForm.bf16)
    assert accumulation_dtype(parsed) == torch.bfloat16
    parsed = DeepSpeedConfig(config({"optimizer_states": "int8"}, bf16_keys=stock))
    assert state_forms(parsed).moments is MomentForm.int8, "the smaller one wins"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (config({"master_weights": "bf16"}), (f"{OFFLOAD}.master_weights", '"bf16_residual"', "got")),
        (config({"optimizer_states_seed": 1 << 63}), (f"{OFFLOAD}.optimizer_states_seed", "a number < 9.2")),
        (config({"optimizer_states": 8}), (f"{OFFLOAD}.optimizer_states", '"int8"', "got 8")),
        (
            config({"master_weights": "bf16_residual"}, bf16=False, fp16={"enabled": True}),
            (f"{OFFLOAD}.master_weights", "unless bf16.enabled", "fp16 has another exponent"),
        ),
        (
            config({"optimizer_states": "int8"}, device="none"),
            (f"{OFFLOAD}.optimizer_states", "without optimizer offload", "device"),
        ),
        (
            config({"optimizer_states": "int8"}, stage=0),
            (f"{OFFLOAD}.optimizer_states", "without optimizer offload", "stage"),
        ),
        (
            config(bf16_keys={"bf16_optimizer_states": True}, device="none"),
            ("bf16.bf16_optimizer_states", "false without optimizer offload", "True"),
        ),
        (
            config(bf16_keys={"bf16_master_weights_and_grads": True}, bf16=False),
            ("bf16.bf16_master_weights_and_grads", "false unless bf16.enabled", "True"),
        ),
        (
            config({"master_weights": "bf16_residual"}, checkpoint={"async_save": True}),
            ("checkpoint.async_save", "bf16_residual", "True"),
        ),
    ],
)
def test_what_cannot_hold_is_refused_by_name(settings, words):
    with pytest.raises(DeepSpeedConfigError) as caught:
        DeepSpeedConfig(settings)
    for word in words:
        assert word in str(caught.value)
