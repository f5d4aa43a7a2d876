"""Fixtures for every test."""

import logging

import pytest


@pytest.fixture
def caplog(caplog):
    """pytest's caplog, which also sees the package's logger: it does not propagate to the root logger."""
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
