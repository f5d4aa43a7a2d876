"""A wrong value of a named optimizer or schedule is an error with its full key, the value and what to do."""

import pytest
import torch

from deepspeed.runtime.lr_schedules import build_lr_scheduler
from deepspeed.runtime.optimizers import build_optimizer


def parameters():
    return [torch.nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"learning_rate": 1e-3}, "optimizer.params.learning_rate: expected a parameter of "),
        ({"lr": "1e-3"}, "optimizer.params.lr: expected a number, got '1e-3'. Correct "),
        ({"lr": None}, "optimizer.params.lr: expected a number, got None. Correct "),
        ({"betas": 0.9}, "optimizer.params.betas: expected 2 numbers, got 0.9. Correct "),
        ({"betas": [0.9]}, "optimizer.params.betas: expected 2 numbers, got [0.9]. Correct "),
        ({"weight_decay": True}, "optimizer.params.weight_decay: expected a number, got True. Correct "),
        ({"adam_w_mode": "no"}, "optimizer.params.adam_w_mode: expected true or false, got 'no'. Correct "),
    ],
)
def test_optimizers(params, words, offload):
    with pytest.raises(ValueError) as caught:
        build_optimizer("AdamW", params, parameters(), offload)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(("name", "offload"), [("AdamW", True), ("AdamW", False), ("SGD", True)])
def test_values_that_only_the_class_can_judge(name, offload):
    with pytest.raises(ValueError) as caught:
        build_optimizer(name, {"lr": -1.0}, parameters(), offload)
    text = str(caught.value)
    assert text.startswith("optimizer.params") and "-1" in text and "Correct the" in text


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("WarmupLR", {"warmup": 1}, "scheduler.params.warmup: expected a parameter of WarmupLR"),
        ("WarmupLR", {"warmup_num_steps": 0}, "scheduler.params.warmup_num_steps: expected a positive "),
        (
            "WarmupDecayLR",
            {},
            "scheduler.params.total_num_steps: expected a value for WarmupDecayLR, got none",
        ),
        ("WarmupDecayLR", {"total_num_steps": "x"}, "scheduler.params: expected values that WarmupDecayLR "),
        ("StepLR", {"step_size": 2, "gamma": "x"}, "scheduler.params.gamma: expected a number, got 'x'. "),
        ("Cosine", {}, "scheduler.type: expected one of "),
    ],
)
def test_schedules(name, params, words):
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    with pytest.raises(ValueError) as caught:
        build_lr_scheduler(name, params, optimizer)
    assert str(caught.value).startswith(words)


def test_right_values_of_every_kind_pass():
    params = {"lr": 1, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0, "amsgrad": False}
    optimizer = build_optimizer("AdamW", params, parameters(), offload=True)
    assert optimizer.param_groups[0]["lr"] == 1
    rates = {"warmup_min_lr": [0.0], "warmup_max_lr": 0.1, "warmup_num_steps": 2}
    build_lr_scheduler("WarmupLR", rates, optimizer).step()
