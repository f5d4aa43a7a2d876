"""Schedules against the figures of DeepSpeed 0.19.8, and their contract with optimizers and checkpoints."""

import json
from pathlib import Path

import pytest
import torch

from deepspeed.runtime import lr_schedules
from deepspeed.runtime.lr_schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_lr_scheduler,
)

CASES = json.loads((Path(__file__).parents[1] / "data" / "lr_schedules.json").read_text())["cases"]
STEPS = 50
# Both sides compute in double; only the order of two or three operations may differ.
ROUNDING = 1e-14


def make_optimizer(kind="sgd", groups=1, lr=0.01):
    params = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for _ in range(groups)]
    return torch.optim.Adam(params, lr=lr) if kind == "adam" else torch.optim.SGD(params, lr=lr, momentum=0.5)


def case_name(case):
    return f"{case['schedule']}-{case['optimizer']}-" + ",".join(
        f"{k}={v}" for k, v in case["params"].items()
    )


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_rates_are_those_of_deepspeed(case):
    optimizer = make_optimizer(case["optimizer"])
    schedule = getattr(lr_schedules, case["schedule"])(optimizer, **case["params"])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(case["before"], rel=ROUNDING)
    rates = []
    for _ in range(STEPS):
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
        assert schedule.get_last_lr() == [rates[-1]]
    assert rates == pytest.approx(case["lr"], rel=ROUNDING)


@pytest.mark.parametrize("case", [case for case in CASES if "betas" in case], ids=case_name)
def test_momenta_are_those_of_deepspeed(case):
    optimizer = make_optimizer("adam")
    schedule = getattr(lr_schedules, case["schedule"])(optimizer, **case["params"])
    for expected in case["betas"]:
        schedule.step()
        assert list(optimizer.param_groups[0]["betas"]) == pytest.approx(expected, rel=ROUNDING)


def test_every_valid_name_is_a_class():
    assert VALID_LR_SCHEDULES == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    assert all(isinstance(getattr(lr_schedules, name), type) for name in VALID_LR_SCHEDULES)


def test_a_resumed_schedule_goes_on_where_it_stopped():
    params = {"total_num_steps": 20, "warmup_num_steps": 5}
    straight = WarmupDecayLR(make_optimizer(), **params)
    for _ in range(12):
        straight.step()
    resumed = WarmupDecayLR(make_optimizer(), **params)
    resumed.load_state_dict({"last_batch_iteration": 7})
    for _ in range(4):
        resumed.step()
    assert resumed.get_last_lr() == straight.get_last_lr()
    assert resumed.state_dict() == straight.state_dict() == {"last_batch_iteration": 11}


def test_step_goes_to_a_given_iteration():
    schedule = WarmupLR(make_optimizer(), warmup_max_lr=0.1, warmup_num_steps=10, warmup_type="linear")
    schedule.step(5)
    assert schedule.get_last_lr() == [0.05]
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.06])


def test_group_dicts_are_written_in_place():
    optimizer = make_optimizer(groups=2)
    groups = list(optimizer.param_groups)
    schedule = WarmupLR(optimizer, warmup_min_lr=[0.0, 0.1], warmup_max_lr=[1.0, 2.0], warmup_num_steps=1)
    for _ in range(3):
        schedule.step()
    assert [group["lr"] for group in groups] == [1.0, 2.0]


def test_a_tensor_rate_is_filled_not_replaced():
    rate = torch.tensor(0.01)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=rate, capturable=True)
    schedule = WarmupLR(optimizer, warmup_max_lr=0.5, warmup_num_steps=1)
    schedule.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_anything_with_param_groups_can_be_scheduled():
    class Wrapper:
        param_groups = [{"lr": 0.1, "params": []}]

    LRRangeTest(Wrapper(), lr_range_test_min_lr=0.3)
    assert Wrapper.param_groups[0]["lr"] == 0.3
    with pytest.raises(TypeError, match="optimizer: expected an object with param_groups, got int"):
        WarmupLR(3)


def test_last_lr_before_a_rate_was_written_is_an_assertion_that_clients_recognise():
    schedule = OneCycle(make_optimizer(), cycle_min_lr=0.1, cycle_max_lr=0.2)
    with pytest.raises(AssertionError, match="need to call step"):
        schedule.get_last_lr()


@pytest.mark.parametrize("steps", [0, -1, 2.5, True])
@pytest.mark.parametrize("schedule", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
def test_warmup_steps_must_be_a_positive_integer(schedule, steps):
    params = {} if schedule is WarmupLR else {"total_num_steps": 10}
    with pytest.raises(ValueError, match="warmup_num_steps: expected a positive integer"):
        schedule(make_optimizer(), warmup_num_steps=steps, **params)


def test_rates_must_fit_the_groups():
    with pytest.raises(ValueError, match=r"warmup_min_lr: expected 1 value per parameter group \(1\), got 2"):
        WarmupLR(make_optimizer(), warmup_min_lr=[0.1, 0.2])
    with pytest.raises(ValueError, match="warmup_max_lr: expected a number"):
        WarmupLR(make_optimizer(), warmup_max_lr="auto")


def test_an_unknown_warmup_type_is_said_and_becomes_log(caplog):
    schedule = WarmupLR(make_optimizer(), warmup_max_lr=1.0, warmup_num_steps=10, warmup_type="cubic")
    assert "warmup_type: expected 'log' or 'linear', got 'cubic'" in caplog.text
    schedule.step(4)
    assert schedule.get_last_lr() == pytest.approx([0.69897], rel=1e-5)


def test_momentum_without_betas_is_said_and_left_alone(caplog):
    optimizer = make_optimizer("sgd")
    schedule = OneCycle(optimizer, cycle_min_lr=0.1, cycle_max_lr=0.2)
    schedule.step()
    assert "expected an optimizer with betas, got SGD" in caplog.text
    assert optimizer.param_groups[0]["momentum"] == 0.5
    assert schedule.get_mom() is None


def test_schedules_by_name():
    optimizer = make_optimizer()
    assert isinstance(build_lr_scheduler("WarmupLR", {"warmup_num_steps": 3}, optimizer), WarmupLR)
    assert isinstance(
        build_lr_scheduler("StepLR", {"step_size": 3}, optimizer), torch.optim.lr_scheduler.StepLR
    )


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("Warmup", {}, "scheduler.type: expected one of LRRangeTest"),
        ("EPOCH_DEPRECATION_WARNING", {}, "scheduler.type: expected one of LRRangeTest"),
        ("WarmupLR", {"warmup_steps": 3}, "scheduler.params.warmup_steps: expected a parameter of WarmupLR"),
        (
            "WarmupDecayLR",
            {},
            "scheduler.params.total_num_steps: expected a value for WarmupDecayLR, got none",
        ),
    ],
)
def test_a_wrong_name_or_parameter_is_named(name, params, message):
    with pytest.raises(ValueError, match=message):
        build_lr_scheduler(name, params, make_optimizer())


def test_a_schedule_without_an_optimizer_says_what_to_add():
    with pytest.raises(ValueError, match="expected an optimizer for WarmupLR to schedule, got none"):
        build_lr_scheduler("WarmupLR", {}, None)
