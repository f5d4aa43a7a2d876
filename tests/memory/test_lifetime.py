"""Memory over a long life: flat over steps, and returned when an engine ends, however it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.memory.job import MIB

ROOT = Path(__file__).parents[2]


def growth(what):
    """RSS growth in bytes after each round."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.memory.lifetime", what],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def slope(values):
    """Bytes a round, least squares."""
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    above = sum((index - middle) * (value - mean) for index, value in enumerate(values))
    return above / sum((index - middle) ** 2 for index in range(len(values)))


@pytest.mark.parametrize("what", ["steps", "evaluations"])
def test_steps_skipped_steps_evaluations_and_state_dicts_add_nothing(what):
    # The first rounds fill the C heap. An engine is 56 MiB, a gradient 2 MiB: a leak of either shows.
    values = growth(what)[5:]
    assert max(values) - min(values) < 8 * MIB
    assert abs(slope(values)) < MIB / 4


@pytest.mark.parametrize("how", ["destroyed", "dropped"])
def test_twenty_engines_over_one_model_leave_nothing_behind(how):
    values = growth(how)
    # 56 MiB of an engine are gone but for what the C heap keeps of gradients.
    assert max(values) < 24 * MIB
    assert abs(slope(values[5:])) < MIB / 4
