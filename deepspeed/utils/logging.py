"""The package's logger, and logging from chosen ranks only.

Importing this module adds one handler to the logger named "DeepSpeed" and touches no other logger.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import torch.distributed as dist

__all__ = ["log_dist", "logger", "rank_for_logging", "set_log_level_from_string"]

_FORMAT = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class _CurrentStdout(logging.StreamHandler):
    """Writes to what sys.stdout is at the time of the record, so that redirection after import is seen."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[no-untyped-def]
        return sys.stdout


def _make_logger() -> logging.Logger:
    made = logging.getLogger("DeepSpeed")
    made.propagate = False
    if not any(isinstance(handler, _CurrentStdout) for handler in made.handlers):
        handler = _CurrentStdout()
        handler.setFormatter(logging.Formatter(_FORMAT))
        made.addHandler(handler)
    if made.level == logging.NOTSET:
        made.setLevel(logging.INFO)
    return made


logger: logging.Logger = _make_logger()


def rank_for_logging() -> int:
    """Return this process's rank: the process group's, else the launcher's RANK, else 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else 0


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message, prefixed with the rank, on some ranks only.

    Args:
        message: Text.
        ranks: Ranks that log it; a sequence with -1 means every rank, and so do None and an empty sequence.
        level: A level of the logging module.

    Source: the name and prefix are DeepSpeed's. There, None logs on no rank once a process group exists.
    """
    rank = rank_for_logging()
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message, stacklevel=2)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of the package's logger, or of another, by name.

    Args:
        log_level_str: "debug", "info", "warning", "error" or "critical", in any letter case.
        custom_logger: Logger to set instead of the package's.

    Raises:
        ValueError: Another word.
    """
    level = _LEVELS.get(str(log_level_str).lower())
    if level is None:
        raise ValueError(f"log_level: expected one of {', '.join(_LEVELS)}, got {log_level_str!r}.")
    (custom_logger or logger).setLevel(level)
