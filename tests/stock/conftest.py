"""Fixtures of the tests that patch stock."""

import pytest

from tests.stock_python import STOCK, held_ops


@pytest.fixture(scope="session", autouse=True)
def stocks_ops():
    """Stock's compiled ops, and ours beside them, stay from test to test."""
    if STOCK is None:
        yield
        return
    with held_ops():
        yield
