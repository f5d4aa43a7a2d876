"""The batch triangle: samples a step = samples a micro-batch * micro-batches a step * ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.config_problems import Problems

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


def complete_triangle(given: Mapping[str, Any], world_size: int, problems: Problems) -> dict[str, int]:
    """Derive the missing corners from those given.

    Args:
        given: The three keys, in samples and micro-batches; absent or None where not given.
        world_size: Number of data-parallel ranks.
        problems: Collects values that are not positive whole numbers, and contradictions.

    Returns:
        All three corners; empty when there are problems.

    Source: DeepSpeed derives by floor division and then checks the product; so does this.
    """
    values: dict[str, int] = {}
    sound = True
    for key in (TRAIN, MICRO, STEPS):
        value = given.get(key)
        if value is None:
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or value != value // 1
            or value <= 0
        ):
            problems.fault(key, "a whole number > 0", value)
            sound = False
        else:
            values[key] = int(value)
    if not sound:
        return {}
    if TRAIN not in values and MICRO not in values:
        problems.fault(f"{TRAIN} or {MICRO}", "a whole number > 0", None, "Give at least one of the two.")
        return {}
    corners = _derive(values, world_size)
    product = corners[MICRO] * corners[STEPS] * world_size
    if product != corners[TRAIN]:
        _contradiction(values, corners, world_size, problems)
        return {}
    return corners


def _derive(values: Mapping[str, int], world_size: int) -> dict[str, int]:
    train, micro, steps = values.get(TRAIN), values.get(MICRO), values.get(STEPS)
    if micro is None:
        steps = steps or 1
        micro = values[TRAIN] // world_size // steps
    if steps is None:
        steps = train // micro // world_size if train is not None else 1
    if train is None:
        train = micro * steps * world_size
    return {TRAIN: train, MICRO: micro, STEPS: steps}


def _contradiction(
    values: Mapping[str, int], corners: Mapping[str, int], world_size: int, problems: Problems
) -> None:
    train, micro, steps = (corners[key] for key in (TRAIN, MICRO, STEPS))
    marks = {key: "" if key in values else " (derived)" for key in corners}
    constraint = (
        f"{MICRO}{marks[MICRO]} * {STEPS}{marks[STEPS]} * world size"
        f" = {micro} * {steps} * {world_size} = {micro * steps * world_size}"
    )
    if len(values) == 3:
        advice = "Change one of the three, or leave one out to have it derived."
    else:
        step = world_size * (values.get(MICRO) or values.get(STEPS) or 1)
        advice = f"Choose a {TRAIN} that is a multiple of {step}."
    problems.fault(TRAIN, constraint, train, advice)
