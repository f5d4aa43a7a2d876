"""The fp32 weights of a checkpoint, by name, read from the optimizer files when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepspeed.runtime.checkpoint.atomic import TagFolder
from deepspeed.runtime.checkpoint.load import optimizer_files, read_shard, world_of
from deepspeed.runtime.checkpoint.names import LATEST, MODEL_STATES, CheckpointError, read_latest
from deepspeed.runtime.checkpoint.saved_optimizer import MASTER, ShardedState
from deepspeed.runtime.checkpoint.torch_read import read_torch_file


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read when it is needed.

    Args:
        shape: its shape.
        dtype: its type.
        read: returns it; a view of the mapped file where it lies in one piece.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def contiguous(self) -> torch.Tensor:
        """The tensor. Named as stock names it."""
        return self.read()


@dataclass(frozen=True)
class Fp32Weights:
    """What a checkpoint's weights are, without having read them.

    Args:
        tensors: name -> tensor: buffers, frozen parameters, trainable parameters' fp32 masters.
        shared: second names of tied parameters -> their first.
    """

    tensors: Mapping[str, LazyTensor]
    shared: Mapping[str, str]

    def items(self) -> Iterator[tuple[str, LazyTensor]]:
        """All names with their tensors; tied parameters under each of theirs."""
        yield from self.tensors.items()
        for name, first in self.shared.items():
            if first in self.tensors:
                yield name, self.tensors[first]


def open_fp32_weights(checkpoint_dir: Path, tag: str | None, exclude_frozen: bool) -> Fp32Weights:
    """Look at a checkpoint of stage 1 or 2, of this package or of stock.

    Args:
        checkpoint_dir: the checkpoint folder.
        tag: name of the subfolder; None: what `latest` names.
        exclude_frozen: leave out frozen parameters.

    Raises:
        ValueError: there is no tag and no `latest`.
        CheckpointError: a file is absent or damaged, or the checkpoint is of another stage.
    """
    tag = tag or read_latest(checkpoint_dir)
    if tag is None:
        raise ValueError(f"tag: expected one, or a file {checkpoint_dir / LATEST}, got neither. Pass a tag.")
    folder = TagFolder.open(checkpoint_dir / tag)
    model = read_torch_file(folder.locate(MODEL_STATES))
    saved = _open_masters(folder, model)
    tensors: dict[str, LazyTensor] = {}
    for name in model.get("buffer_names") or ():
        _add(tensors, name, model["module"].get(name))
    if not exclude_frozen:
        for name, value in (model.get("frozen_param_fragments") or {}).items():
            _add(tensors, name, value)
    for group, named in enumerate(model["param_shapes"]):
        for name, shape in named.items():
            read = partial(_read_master, saved, group, name, torch.Size(shape))
            tensors[name] = LazyTensor(torch.Size(shape), torch.float32, read)
    return Fp32Weights(tensors, dict(model.get("shared_params") or {}))


def _open_masters(folder: TagFolder, model: Mapping[str, Any]) -> ShardedState:
    shapes = model.get("param_shapes")
    if not shapes or model.get("optimizer") is not None:
        raise CheckpointError(
            f"{folder.path}: expected a checkpoint of ZeRO stage 1 or 2, got one without sharded masters. "
            f"Its weights are in {MODEL_STATES} under 'module'."
        )
    paths = optimizer_files(folder)
    world = world_of(read_shard(paths, min(paths, default=0)))
    return ShardedState({rank: read_shard(paths, rank) for rank in range(world)}, world, shapes)


def _add(tensors: dict[str, LazyTensor], name: str, value: torch.Tensor | None) -> None:
    if value is not None:
        tensors[name] = LazyTensor(value.shape, value.dtype, partial(_same, value))


def _read_master(saved: ShardedState, group: int, name: str, shape: torch.Size) -> torch.Tensor:
    return saved.tensor(MASTER, group, name).view(shape)


def _same(value: torch.Tensor) -> torch.Tensor:
    return value
