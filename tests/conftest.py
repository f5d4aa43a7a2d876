"""Fixtures for every test."""

import logging
import os

import pytest
import torch.distributed as dist

from tests.square_root import round_correctly

round_correctly()


@pytest.fixture
def caplog(caplog):
    """pytest's caplog, which also sees the package's logger: it does not propagate to the root logger."""
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture(scope="module")
def world_of_one():
    """Engines in this process: what `deepspeed.initialize` sets up is taken down after the module's tests."""
    environment = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
