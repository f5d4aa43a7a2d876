"""What every test on several ranks wants to find done."""

import contextlib

import pytest

from deepspeed.ops.op_builder import CPUAdamBuilder


@pytest.fixture(scope="session", autouse=True)
def compiled_op():
    """The op is built before the first test, so that its compilation is in no rank's time limit."""
    with contextlib.suppress(RuntimeError):  # without a compiler each test that needs it says so
        CPUAdamBuilder().load()
