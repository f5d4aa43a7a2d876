"""Stock's interpreter, and the ops that it compiles."""

import fcntl
import os
from pathlib import Path

import pytest

STOCK = os.environ.get("DS_STOCK_PYTHON")
STOCKS_OPS = Path(STOCK or "").absolute().parent.with_name("ops")
COMPILER = STOCKS_OPS / "g++"  # without the debug information that stock asks for: half the time
LIMIT_S = 900  # stock compiles its ops first


@pytest.fixture(scope="session")
def stocks_ops():
    """Stock's compiled ops, held by one run at a time: a lock that lies there is a killed build's."""
    STOCKS_OPS.mkdir(exist_ok=True)
    with open(STOCKS_OPS / "in_use", "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        for lock in STOCKS_OPS.glob("*/lock"):
            lock.unlink()  # torch would wait for it for ever
        COMPILER.write_text('#!/bin/sh\nexec g++ "$@" -g0\n')
        COMPILER.chmod(0o755)
        yield
