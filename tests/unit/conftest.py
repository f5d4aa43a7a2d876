"""Fixtures for the unit tests."""

import os

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def world_of_one():
    """Engines in this process: what `deepspeed.initialize` sets up is taken down after the module's tests."""
    environment = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
