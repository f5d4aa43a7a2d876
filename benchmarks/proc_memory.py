"""What Linux tells of the memory of a process and of its children. Imports nothing heavy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def status_nbytes(pid: int | str, field: str) -> int:
    """Returns a field of a process's status: VmRSS, VmHWM."""
    return _kilobytes(Path(f"/proc/{pid}/status"), field) * 1024


def family_pss_nbytes(pid: int, but: int | None = None) -> int:
    """Proportional set size of a process and all its descendants: what the machine would get back.

    Args:
        pid: the process.
        but: a descendant that does not count.
    """
    total = 0
    for member in _family(pid):
        if member != but:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                total += _kilobytes(Path(f"/proc/{member}/smaps_rollup"), "Pss") * 1024
    return total


def _family(pid: int) -> Iterator[int]:
    todo = [pid]
    while todo:
        member = todo.pop()
        yield member
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{member}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())


def _kilobytes(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == field:
            return int(value.split()[0])
    raise RuntimeError(f"{path}: expected a line {field}, got none. This benchmark needs Linux.")
