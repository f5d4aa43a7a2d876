"""The compiled op, once for all tests of this folder."""

from types import ModuleType

import pytest

from deepspeed.ops.op_builder import CPUAdamBuilder


@pytest.fixture(scope="session")
def op() -> ModuleType:
    return CPUAdamBuilder().load()
