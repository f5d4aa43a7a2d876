"""Stock's compiled ops are held for the whole run."""

from collections.abc import Iterator

import pytest

from tests.stock_python import held_ops


@pytest.fixture(scope="session")
def stocks_ops() -> Iterator[None]:
    with held_ops():
        yield
