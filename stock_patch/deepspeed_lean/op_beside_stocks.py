"""Our op where stock loads its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_STOCKS_OWN = "zenflow_"  # start of the names of functions that ours has no counterpart of


class OpBesideStocks:
    """Has the functions of our op, and those of ZenFlow's workers from stock's, compiled when asked for.

    Args:
        ours: our op.
        load_stocks: loads stock's.
    """

    def __init__(self, ours: Any, load_stocks: Callable[[], Any]) -> None:
        self._ours = ours
        self._load_stocks = load_stocks

    def __getattr__(self, name: str) -> Any:
        """A function of either op."""
        if name.startswith("_"):
            raise AttributeError(name)  # asked for by copies, before there is anything to ask
        return getattr(self._load_stocks() if name.startswith(_STOCKS_OWN) else self._ours, name)
