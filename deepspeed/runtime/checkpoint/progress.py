"""A bar for work that lasts."""

from __future__ import annotations

from typing import Any

_SHOW_AFTER_S = 2.0


def byte_bar(what: str, total_nbytes: int, shown: bool) -> Any:
    """A bar of bytes and their rate that appears once the work has taken two seconds.

    Args:
        what: words in front of the bar.
        total_nbytes: what 100 % is.
        shown: whether this rank shows it.

    Returns:
        A tqdm bar, for a `with` block.
    """
    from tqdm import tqdm

    return tqdm(
        total=total_nbytes,
        desc=what,
        unit="B",
        unit_scale=True,
        disable=not shown,
        delay=_SHOW_AFTER_S,
        leave=False,
    )
