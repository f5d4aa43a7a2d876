"""Writes a state dictionary to one file, for use without DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from deepspeed.runtime.checkpoint import atomic
from deepspeed.runtime.checkpoint.agreement import Agreement
from deepspeed.runtime.checkpoint.torch_file import write_torch_file


def write_weights(
    path: Path, weights: Mapping[str, torch.Tensor], writes: bool, agreement: Agreement
) -> None:
    """Write on one rank; all ranks learn how it went.

    Raises:
        CheckpointError: it cannot be written; what stood there stays.
    """

    def write() -> None:
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(atomic.temporary_name(path.name, f"{os.getpid() & 0xFFFFFFFF:08x}"))
            write_torch_file(temporary, weights)
            os.replace(temporary, path)

    agreement.together("save_16bit_model", write)
