"""A save that goes on while training does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger("DeepSpeed")


class PendingSave:
    """A piece of work on a thread of its own, and its error.

    The thread keeps the process alive until the checkpoint is whole.

    Args:
        work: what to do; started at once.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint-save", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the end.

        Raises:
            CheckpointError: the save failed; the same on every rank.
        """
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            logger.error("checkpoint.async_save: %s", error)
            self._error = error
