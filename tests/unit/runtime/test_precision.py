"""Loss scales, step by step as DeepSpeed 0.19.8's dynamic scaler moves them."""

import pytest

from deepspeed.runtime.config_sections import FP16Config
from deepspeed.runtime.precision import DynamicLossScaler, LossScaler, ScaleRules, create_loss_scaler

START = 2.0**16
# Overflow sequence ("1" is an overflow), start, rules, and DeepSpeed's scales after each step.
SEQUENCES = [
    ("0" * 10, START, {}, [1, 1, 1, 1, 2, 2, 2, 2, 4, 4]),
    ("1111", 4.0, {}, [1 / 2, 1 / 4, 1 / 4, 1 / 4]),
    ("1111", 4.0, {"min_scale": 0.5}, [1 / 2, 1 / 4, 1 / 8, 1 / 8]),
    ("101010101", START, {"hysteresis": 2}, [1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4, 1 / 8, 1 / 8, 1 / 16]),
    ("11011", START, {"hysteresis": 2}, [1, 1 / 2, 1 / 2, 1 / 4, 1 / 8]),
    ("101010101", START, {"hysteresis": 2, "consecutive_hysteresis": True}, [1] * 9),
    (
        "11011011",
        START,
        {"hysteresis": 2, "consecutive_hysteresis": True},
        [1, 1 / 2, 1 / 2, 1 / 2, 1 / 4, 1 / 4, 1 / 4, 1 / 8],
    ),
    ("11000011", START, {"hysteresis": 2}, [1, 1 / 2, 1 / 2, 1 / 2, 1 / 2, 1 / 2, 1 / 4, 1 / 8]),
    ("100001000000000", START, {}, [1 / 2] * 5 + [1 / 4] * 5 + [1 / 2] * 4 + [1]),
    ("1100001100", START, {"hysteresis": 3}, [1] * 6 + [1 / 2] + [1 / 4] * 3),
    ("000000001", 0.25, {}, [1, 1, 1, 1, 2, 2, 2, 2, 4]),
    ("1", 3.0, {"min_scale": 2.0}, [2 / 3]),
    (
        "000100001111000000",
        START,
        {"hysteresis": 2, "window": 3},
        [1] * 7 + [2, 2, 1, 1 / 2, 1 / 4, 1 / 4, 1 / 4, 1 / 4, 1 / 2, 1 / 2, 1 / 2],
    ),
]


def make_scaler(start=START, **rules):
    defaults = {"window": 4, "hysteresis": 1, "raise_error_at_min_scale": False}
    return DynamicLossScaler(start, ScaleRules(**{**defaults, **rules}))


def scales(scaler, overflows):
    seen = []
    for overflow in overflows:
        scaler.update_scale(overflow == "1")
        seen.append(scaler.loss_scale)
    return seen


@pytest.mark.parametrize(("overflows", "start", "rules", "factors"), SEQUENCES)
def test_the_scale_moves_as_deepspeeds(overflows, start, rules, factors):
    assert scales(make_scaler(start, **rules), overflows) == [start * factor for factor in factors]


def test_a_static_scale_never_moves():
    scaler = LossScaler(128)
    scaler.update_scale(True)
    assert (scaler.loss_scale, scaler.dynamic) == (128.0, False)


def test_an_overflow_at_the_floor_ends_training_and_says_why():
    scaler = make_scaler(4.0, raise_error_at_min_scale=True)
    assert scales(scaler, "11") == [2.0, 1.0]
    with pytest.raises(RuntimeError, match=r"fp16.min_loss_scale.* already at minimum .*use bf16"):
        scaler.update_scale(True)


def test_old_and_new_scale_are_logged(caplog):
    scaler = make_scaler(8.0, hysteresis=2, min_scale=4.0)
    scales(scaler, "1110000")
    assert "loss scale stays 8 (hysteresis 2 -> 1)" in caplog.text
    assert "loss scale 8 -> 4" in caplog.text
    assert "loss scale is at its floor, 4" in caplog.text
    assert "loss scale 4 -> 8 after 4 clean steps" not in caplog.text
    scaler.update_scale(False)
    assert "loss scale 4 -> 8 after 4 clean steps" in caplog.text


def test_a_resumed_scaler_moves_as_an_uninterrupted_one():
    straight, stopped = make_scaler(hysteresis=2), make_scaler(hysteresis=2)
    scales(straight, "0010010")
    scales(stopped, "0010010")
    resumed = make_scaler(1.0, hysteresis=2)
    resumed.load_state_dict(stopped.state_dict())
    assert scales(resumed, "1000000010") == scales(straight, "1000000010")


def test_the_state_is_plain_numbers():
    assert all(type(value) in (int, float) for value in make_scaler().state_dict().values())


def test_the_configuration_chooses_the_scaler():
    assert isinstance(create_loss_scaler(None), LossScaler)
    assert create_loss_scaler(None).loss_scale == 1.0
    assert create_loss_scaler(FP16Config(enabled=True, loss_scale=64)).loss_scale == 64.0
    dynamic = create_loss_scaler(
        FP16Config(
            enabled=True, initial_scale_power=3, loss_scale_window=7, hysteresis=5, min_loss_scale=2,
            consecutive_hysteresis=True,
        )
    )  # fmt: skip
    assert dynamic.dynamic
    assert dynamic.loss_scale == 8.0
    assert dynamic.rules == ScaleRules(7, 2.0, 5, True, True)
