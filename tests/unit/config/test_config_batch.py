"""The batch triangle is derived from any subset, with DeepSpeed's arithmetic, at any world size."""

import pytest

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def corners(config, world_size):
    made = DeepSpeedConfig(config, world_size)
    return tuple(getattr(made, key) for key in KEYS)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("given", [0b100, 0b010, 0b110, 0b101, 0b011, 0b111])
def test_any_subset_with_a_batch_size_gives_the_whole_triangle(given, world_size):
    micro, steps = 4, 5 if given & 0b001 or given == 0b110 else 1
    whole = (micro * steps * world_size, micro, steps)
    config = {key: value for bit, key, value in zip((4, 2, 1), KEYS, whole, strict=True) if given & bit}
    assert corners(config, world_size) == whole


def test_null_counts_as_not_given():
    assert corners(dict.fromkeys(KEYS) | {"train_batch_size": 6}, 3) == (6, 2, 1)


def test_a_whole_float_is_a_count():
    assert corners({"train_batch_size": 8.0}, 2) == (8, 4, 1)


@pytest.mark.parametrize("config", [{}, {"gradient_accumulation_steps": 2}])
def test_without_a_batch_size_both_keys_are_named(config):
    with pytest.raises(
        DeepSpeedConfigError, match="train_batch_size or train_micro_batch_size_per_gpu: expected"
    ):
        DeepSpeedConfig(config)


def test_contradiction_names_every_key_and_value():
    config = dict(zip(KEYS, (4, 2, 1), strict=True))
    with pytest.raises(DeepSpeedConfigError) as error:
        DeepSpeedConfig(config, world_size=3)
    text = str(error.value)
    assert "train_batch_size: expected" in text
    assert (
        "train_micro_batch_size_per_gpu * gradient_accumulation_steps * world size = 2 * 1 * 3 = 6, got 4"
        in text
    )


def test_indivisible_batch_says_which_multiple_is_needed():
    with pytest.raises(
        DeepSpeedConfigError, match="got 7. Choose a train_batch_size that is a multiple of 6"
    ):
        DeepSpeedConfig({"train_batch_size": 7, "gradient_accumulation_steps": 3}, world_size=2)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [0, -4, 2.5, "4", True, float("nan"), float("inf")])
def test_a_corner_that_is_no_positive_count_is_named(key, value):
    config = {"train_batch_size": 4} | {key: value}
    with pytest.raises(DeepSpeedConfigError, match=f"{key}: expected a whole number > 0, got"):
        DeepSpeedConfig(config)


@pytest.mark.parametrize("world_size", [0, -1, 1.5, True])
def test_world_size_must_be_a_count(world_size):
    with pytest.raises(DeepSpeedConfigError, match="world_size: expected a whole number >= 1"):
        DeepSpeedConfig({"train_batch_size": 4}, world_size)
