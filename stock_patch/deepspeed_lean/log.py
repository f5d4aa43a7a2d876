"""Where the patch says what it does."""

from __future__ import annotations

import logging
import os


def log() -> logging.Logger:
    """Returns a logger that is heard: stock's own says nothing below a warning."""
    logger = logging.getLogger("deepspeed_lean")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(levelname)s] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
        # One line a replacement, not one a rank.
        logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    return logger
