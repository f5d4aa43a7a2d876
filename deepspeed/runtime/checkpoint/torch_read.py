"""Reads checkpoint files: mapped instead of copied, checked, and without running what is pickled in them.

Stock's files hold a few of its classes. They are read into stand-ins with the same attributes; any other
class is refused, except those that the program has named to torch (`torch.serialization.add_safe_globals`).
"""

from __future__ import annotations

import argparse
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import torch

from deepspeed.runtime.checkpoint.names import CheckpointError

_READ_NBYTES = 1 << 22
# "0": files are not read through before they are loaded, which takes time where the page cache cannot hold
# them.
_CHECKSUM_VARIABLE = "DS_CHECKPOINT_CHECKSUMS"
# torch's own switch: the user trusts the files.
_TRUST_VARIABLE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class StoredObject:
    """Stands for an object of a class of stock's: its attributes, without its behaviour."""


class StoredInt(int):
    """Stands for an integer enumeration of stock's."""


_STOCK_CLASSES: dict[str, type] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase": StoredObject,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": StoredObject,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": StoredObject,
    "deepspeed.utils.tensor_fragment.fragment_address": StoredObject,
    "deepspeed.runtime.zero.config.ZeroStageEnum": StoredInt,
}
# Values that client states often hold, and that do nothing when they are rebuilt.
_HARMLESS_CLASSES: tuple[type, ...] = (argparse.Namespace, PosixPath, PurePosixPath)


def read_torch_file(path: Path) -> Any:
    """The content of a file that torch.save, stock or this package has written.

    Tensors are views of the mapped file: their bytes are read when they are used, and are the page cache's.

    Raises:
        CheckpointError: the file is absent, truncated, foreign, or holds a class that nobody allowed.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a checkpoint file, got none. Is the checkpoint complete?")
    _entries(path)
    trusted = os.environ.get(_TRUST_VARIABLE, "").lower() in ("1", "y", "yes", "true")
    try:
        with torch.serialization.safe_globals(_allowed_classes()):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=not trusted)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: expected plain values, got a class that is not allowed: {_first_line(error)} "
            f"Name it to torch.serialization.add_safe_globals, or set {_TRUST_VARIABLE}=1 if you trust the "
            "file."
        ) from error
    except (RuntimeError, EOFError, KeyError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{path}: expected a file of torch.save, got one that it cannot read: {error}."
        ) from error


def verify_torch_file(path: Path, progress: Callable[[int], None]) -> None:
    """Read every byte of a file once and compare the checksums.

    Args:
        path: the file.
        progress: is told of bytes read.

    Raises:
        CheckpointError: a record differs from its checksum.
    """
    entries = _entries(path)
    if os.environ.get(_CHECKSUM_VARIABLE) == "0":
        return
    if any(entry.file_size and not entry.CRC for entry in entries if entry.filename.endswith("data.pkl")):
        return  # torch.serialization.set_crc32_options(False) writes none
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in entries:
                with archive.open(entry) as record:
                    while piece := record.read(_READ_NBYTES):
                        progress(len(piece))
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise CheckpointError(
            f"{path}: expected intact data, got {error}. The file is damaged: load another one."
        ) from error


def unreadable_classes(content: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Where in nested containers a file would need a class that `read_torch_file` refuses.

    Args:
        content: what is to be written.
        path: where it stands.

    Returns:
        Pairs of a place, such as `args.model`, and a class.
    """
    allowed = {item if isinstance(item, type) else item[0] for item in _allowed_classes()}
    allowed |= set(torch.serialization.get_safe_globals())
    stack = [(path, content)]
    while stack:
        place, value = stack.pop()
        if isinstance(value, dict):
            stack += [(f"{place}.{key}" if place else str(key), item) for key, item in value.items()]
        elif isinstance(value, (list, tuple, set)):
            stack += [(f"{place}[{index}]", item) for index, item in enumerate(value)]
        if not _is_plain(value) and type(value) not in allowed:
            yield place, f"{type(value).__module__}.{type(value).__qualname__}"


def _is_plain(value: Any) -> bool:
    """Whether torch's safe unpickler rebuilds such a value; of a container, without its contents."""
    if value is None or isinstance(value, (torch.Tensor, torch.dtype, torch.device)):
        return True
    from collections import Counter, OrderedDict

    plain = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, dict)
    return type(value) in (*plain, OrderedDict, Counter, torch.Size)


def _allowed_classes() -> list[Any]:
    return [(stand_in, name) for name, stand_in in _STOCK_CLASSES.items()] + list(_HARMLESS_CLASSES)


def _entries(path: Path) -> list[zipfile.ZipInfo]:
    """The records of a zip file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.infolist()
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(
            f"{path}: expected a file of torch.save, got one that is truncated or foreign ({error}). Load "
            "another one."
        ) from error


def _first_line(error: Exception) -> str:
    """The part of torch's message that says which class it met."""
    lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
    return (lines or str(error).splitlines() or [""])[0]
