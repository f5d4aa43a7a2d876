"""A bar for work that lasts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

_SHOW_AFTER_S = 2.0
_BEAT_EVERY_S = 1.0


@contextmanager
def byte_bar(
    what: str, total_nbytes: int, shown: bool, beat: Callable[[int], None] | None = None
) -> Iterator[Callable[[int], None]]:
    """Count bytes on a bar that appears once the work has taken two seconds.

    Args:
        what: words in front of the bar.
        total_nbytes: what 100 % is.
        shown: whether this rank shows it.
        beat: called now and then with the bytes so far.

    Returns:
        A context; its value is to be called with the bytes of each piece of work.
    """
    done, last = 0, time.monotonic()
    with tqdm(
        total=total_nbytes,
        desc=what,
        unit="B",
        unit_scale=True,
        disable=not shown,
        delay=_SHOW_AFTER_S,
        leave=False,
    ) as bar:

        def advance(nbytes: int) -> None:
            nonlocal done, last
            done += nbytes
            bar.update(nbytes)
            if beat is not None and time.monotonic() - last > _BEAT_EVERY_S:
                last = time.monotonic()
                beat(done)

        yield advance
