"""A data loader without an end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["RepeatingLoader"]


class RepeatingLoader:
    """Iterates over a loader again and again; a new pass starts where one ends.

    Args:
        loader: Anything that can be iterated more than once.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: The loader is empty.
        """
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)
