"""Writes weights to files as Hugging Face lays them out: one, or numbered shards with an index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed.runtime.checkpoint.fp32_weights import Fp32Weights, LazyTensor
from deepspeed.runtime.checkpoint.progress import byte_bar
from deepspeed.runtime.checkpoint.torch_file import write_torch_file

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


@dataclass(frozen=True)
class ExportSettings:
    """How weights are written.

    Args:
        max_shard_nbytes: most bytes of a file that holds more than one tensor.
        safe: as safetensors instead of torch's format.
        dtype: of floating tensors; None: as they are.
    """

    max_shard_nbytes: int
    safe: bool = False
    dtype: torch.dtype | None = None


def parse_nbytes(text: str | int) -> int:
    """A number of bytes from a number or from text such as `5GB` or `200MiB`.

    Raises:
        ValueError: it is neither.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", str(text), re.IGNORECASE)
    unit = match[2].upper().removesuffix("B") + "B" if match and match[2] else ""
    if match is None or unit not in _UNITS | {"B": 1}:
        raise ValueError(f"max_shard_size: expected a number of bytes such as 5GB, got {text!r}.")
    return max(1, int(float(match[1]) * (_UNITS | {"B": 1})[unit]))


def write_weights_folder(weights: Fp32Weights, folder: Path, settings: ExportSettings) -> list[Path]:
    """Write weights, one shard in memory at a time (views of the mapped files where possible).

    Args:
        weights: what to write.
        folder: where; made if absent.
        settings: how.

    Returns:
        The files, in order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    named = dict(weights.tensors if settings.safe else weights.items())
    shards = _split(named, settings)
    paths = [folder / _shard_name(index, len(shards), settings.safe) for index in range(len(shards))]
    total = sum(_nbytes(tensor, settings) for tensor in named.values())
    with byte_bar("write weights", total, shown=True) as bar:
        for path, shard in zip(paths, shards, strict=True):
            tensors = {name: _converted(tensor, settings) for name, tensor in shard.items()}
            _write_shard(path, tensors, weights, settings.safe)
            bar.update(sum(tensor.nbytes for tensor in tensors.values()))
    if len(shards) > 1:
        weight_map = {name: path.name for path, shard in zip(paths, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        index_name = _shard_name(0, 1, settings.safe) + ".index.json"
        (folder / index_name).write_text(json.dumps(index, indent=2) + "\n")
    return paths


def _split(named: Mapping[str, LazyTensor], settings: ExportSettings) -> list[dict[str, LazyTensor]]:
    """Fill shards in order; a tensor that is larger than a shard gets one of its own."""
    shards: list[dict[str, LazyTensor]] = []
    filled = 0
    for name, tensor in named.items():
        nbytes = _nbytes(tensor, settings)
        if not shards or filled + nbytes > settings.max_shard_nbytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += nbytes
    return shards or [{}]


def _write_shard(path: Path, tensors: dict[str, torch.Tensor], weights: Fp32Weights, safe: bool) -> None:
    temporary = path.with_name(path.name + ".tmp")
    if safe:
        from safetensors.torch import save_file

        # As the library's save_model: a tied name is left out, and the metadata say under which it is found.
        tied = {name: first for name, first in weights.shared.items() if first in tensors}
        save_file(tensors, temporary, metadata={"format": "pt", **tied})
        os.chmod(temporary, 0o644)  # the library makes files that only their owner reads
    else:
        write_torch_file(temporary, tensors)
    os.replace(temporary, path)


def _shard_name(index: int, count: int, safe: bool) -> str:
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    return f"{stem}.{suffix}" if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}.{suffix}"


def _nbytes(tensor: LazyTensor, settings: ExportSettings) -> int:
    dtype = settings.dtype if settings.dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
    return tensor.shape.numel() * dtype.itemsize


def _converted(tensor: LazyTensor, settings: ExportSettings) -> torch.Tensor:
    value = tensor.read()
    return value.to(settings.dtype) if settings.dtype is not None and value.is_floating_point() else value
