"""Holds changes of host state back while a checkpoint still reads it."""

from __future__ import annotations

import threading


class ChangeGate:
    """Lets a reader walk the flat groups in order while a writer follows behind it.

    Goal: training goes on while host buffers are written to a file, without a copy: an element may change as
    soon as it has been read, not before.
    Pattern: the reader calls `passed` as it goes, and `open` at its end, come what may; whoever changes a run
    of a group calls `wait` first. Lifetime: that of one reading.

    Args:
        groups: number of parameter groups.
    """

    def __init__(self, groups: int) -> None:
        self._read_numel = [0] * groups  # elements read, from the start of each group's shard
        self._is_open = False
        self._changed = threading.Condition()

    def passed(self, group: int, end: int) -> None:
        """The reader has read elements `[0, end)` of a group's shard."""
        with self._changed:
            self._read_numel[group] = end
            self._changed.notify_all()

    def open(self) -> None:
        """The reader has ended."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def wait(self, group: int, end: int) -> None:
        """Wait until elements `[0, end)` of a group's shard may change."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_open or self._read_numel[group] >= end)

    def wait_all(self) -> None:
        """Wait until everything may change."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_open)
