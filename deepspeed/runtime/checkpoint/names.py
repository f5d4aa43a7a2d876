"""File names, keys and the one exception of checkpoints.

Source: the files that DeepSpeed 0.19.8 writes, looked at.
"""

from __future__ import annotations

import re
from pathlib import Path

LATEST = "latest"
MODEL_STATES = "mp_rank_00_model_states.pt"
SCRIPT = "zero_to_fp32.py"
# The version of DeepSpeed whose keys the files carry; its loader asks for one.
FORMAT_VERSION = "0.19.8"

_OPTIM_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, for one reason that every rank reports alike."""


def default_tag(global_steps: int) -> str:
    """The tag of a checkpoint that is saved without one."""
    return f"global_step{global_steps}"


def optim_states_name(rank: int, bf16: bool) -> str:
    """The name of a rank's optimizer file."""
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def optim_states_rank(name: str) -> int | None:
    """The rank that a file name of an optimizer file carries; None for other names."""
    match = _OPTIM_STATES.fullmatch(name)
    return int(match[1]) if match else None


def read_latest(folder: Path) -> str | None:
    """The tag that `latest` names; None without that file."""
    path = folder / LATEST
    return path.read_text().strip() if path.is_file() else None
