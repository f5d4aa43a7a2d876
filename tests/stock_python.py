"""The interpreter with stock DeepSpeed, and the ops compiled for it: kept, and used by one run at a time."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

STOCK = os.environ.get("DS_STOCK_PYTHON")
OPS = Path(STOCK or "").absolute().parent.with_name("ops")
COMPILER = OPS / "g++"  # without the debug information that stock asks for: half the time
LIMIT_S = 900  # for a test: stock compiles its ops first


@contextlib.contextmanager
def held_ops() -> Iterator[None]:
    """Hold the folder of stock's compiled ops: a lock that lies there is a killed build's."""
    OPS.mkdir(exist_ok=True)
    with open(OPS / "in_use", "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        for lock in OPS.glob("*/lock"):
            lock.unlink()  # torch would wait for it for ever
        COMPILER.write_text('#!/bin/sh\nexec g++ "$@" -g0\n')
        COMPILER.chmod(0o755)
        yield
