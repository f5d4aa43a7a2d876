"""The steps of a load, the same on every rank: check everything, agree, then copy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepspeed.runtime.checkpoint import atomic
from deepspeed.runtime.checkpoint.agreement import Agreement, attempt
from deepspeed.runtime.checkpoint.model_states import mismatches
from deepspeed.runtime.checkpoint.names import (
    LATEST,
    MODEL_STATES,
    CheckpointError,
    optim_states_rank,
    read_latest,
)
from deepspeed.runtime.checkpoint.optim_load import (
    load_loss_scaler,
    load_optimizer,
    optimizer_mismatches,
    shard_nbytes,
)
from deepspeed.runtime.checkpoint.progress import byte_bar
from deepspeed.runtime.checkpoint.saved_optimizer import SavedOptimizer, ShardedState
from deepspeed.runtime.checkpoint.stage_0 import open_stage_0
from deepspeed.runtime.checkpoint.torch_read import read_torch_file, verify_torch_file
from deepspeed.runtime.zero.collectives import Comm
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

logger = logging.getLogger("DeepSpeed")

_CALL = "load_checkpoint"


@dataclass(frozen=True)
class LoadRequest:
    """What is to be loaded from where.

    Args:
        folder: the checkpoint folder.
        tag: name of the subfolder; None: what `latest` names.
        strict: the model's and the file's weights must have the same names.
        node_local: whether each node has its own file system.
    """

    folder: Path
    tag: str | None
    strict: bool
    node_local: bool


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that every rank has found fit to load.

    Args:
        path: of the model file.
        model: its content, mapped.
        shard: what holds the loss scaler; None if the optimizer is not loaded.
        optimizer: the saved state; None if the optimizer is not loaded.
    """

    path: Path
    model: Mapping[str, Any]
    shard: Mapping[str, Any] | None = None
    optimizer: SavedOptimizer | None = None


class Loader:
    """Reads checkpoints.

    Pattern: every rank opens what it needs and checks it, down to shapes, names and checksums; nothing is
    changed. The ranks agree that all of them can. Then each copies, tensor by tensor, straight from the
    mapped files. Memory: nothing beyond what the training state itself takes; the page cache holds the files.

    Args:
        comm: the data-parallel ranks.
        agreement: how they agree.
    """

    def __init__(self, comm: Comm, agreement: Agreement) -> None:
        self._comm = comm
        self._agreement = agreement

    def check(
        self, request: LoadRequest, module: torch.nn.Module | None, optimizer: DeepSpeedZeroOptimizer | None
    ) -> Loaded | None:
        """Find a checkpoint fit to load, on every rank.

        Args:
            request: what to load.
            module: whose weights must fit; None: the client loads them its own way.
            optimizer: whose state must fit; None: its state is not to be loaded.

        Returns:
            What to load, or None if no tag is given and `latest` is absent.

        Raises:
            CheckpointError: the same on every rank; nothing has changed.
        """
        tag = self._agree_on_tag(request)
        if tag is None:
            return None
        path = request.folder / tag
        loaded: Loaded = self._agreement.together(_CALL, lambda: self._open(request, path, module, optimizer))
        return loaded

    def copy(self, steps: Iterable[Callable[[], Any]]) -> None:
        """Run the steps of a load; an error on one rank is one on all."""
        self._agreement.together(_CALL, lambda: [step() for step in steps])
        self._agreement.part()

    def _agree_on_tag(self, request: LoadRequest) -> str | None:
        tag, error = attempt(lambda: request.tag or read_latest(request.folder))
        words = None if error is None else repr(error)
        messages = self._agreement.exchange(_CALL, {"tag": tag, "error": words}, arriving=True)
        tags = [message["tag"] for message in messages]
        if len(set(tags)) > 1 or any(message["error"] for message in messages):
            raise CheckpointError(
                f"{_CALL}: tag: expected the same on every rank, got {tags} in rank order. "
                "Pass one that all ranks know, "
                f"and see that all ranks see the same {request.folder / LATEST}."
            )
        if tag is None and self._comm.rank == 0:
            logger.warning(
                "load_checkpoint: %s is absent: nothing loaded. Pass a tag, or check the folder.",
                request.folder / LATEST,
            )
        return tag

    def _open(
        self,
        request: LoadRequest,
        path: Path,
        module: torch.nn.Module | None,
        optimizer: DeepSpeedZeroOptimizer | None,
    ) -> Loaded:
        """Open and check on this rank."""
        if not path.is_dir():
            raise CheckpointError(
                f"tag: expected a folder of {path.parent}, got {path.name!r}. There are {_tags(path.parent)}."
            )
        folder = atomic.TagFolder.open(path)
        if self._comm.rank == 0:
            _log_leftovers(path.parent)
        model_path = folder.locate(MODEL_STATES)
        model = read_torch_file(model_path)
        if not isinstance(model, Mapping) or not isinstance(model.get("module"), Mapping):
            raise CheckpointError(
                f"{model_path}: expected weights under 'module', got none. Is it a checkpoint's file?"
            )
        problems = list(mismatches(module, model["module"], request.strict)) if module is not None else []
        ranks = optimizer_files(folder) if optimizer is not None else {}
        self._verify([model_path, *ranks.values()], request.node_local)
        loaded = Loaded(path / MODEL_STATES, model)
        if optimizer is not None:
            loaded = self._open_optimizer(loaded, ranks, optimizer)
            assert loaded.optimizer is not None
            problems += optimizer_mismatches(optimizer, loaded.optimizer)
        if problems:
            raise CheckpointError(f"{path}: does not fit: " + "; ".join(problems))
        return loaded

    def _verify(self, paths: list[Path], node_local: bool) -> None:
        """Compare checksums: each file on one rank, so that all are read once."""
        present = [path for path in paths if path.is_file()]
        mine = present if node_local else present[self._comm.rank :: self._comm.world]
        total = sum(path.stat().st_size for path in mine)
        with byte_bar("check", total, self._comm.rank == 0) as bar:
            for path in mine:
                verify_torch_file(path, bar.update)

    def _open_optimizer(
        self, loaded: Loaded, paths: dict[int, Path], optimizer: DeepSpeedZeroOptimizer
    ) -> Loaded:
        """Open the optimizer state: of stage 0 in the model file, of stages 1 and 2 in files of its own."""
        whole = loaded.model.get("optimizer")
        if whole is not None:
            return Loaded(loaded.path, loaded.model, whole, open_stage_0(whole, loaded.model, optimizer))
        if not paths:
            raise CheckpointError(
                f"{loaded.path.parent}: expected optimizer files, got none. Pass load_optimizer_states=False "
                "to load the weights only."
            )
        return _open_shards(loaded, paths, optimizer)


def _open_shards(loaded: Loaded, paths: dict[int, Path], optimizer: DeepSpeedZeroOptimizer) -> Loaded:
    """Open the files that hold this rank's part; all of them if the order inside cannot be told otherwise."""
    model = loaded.model
    shapes = model.get("param_shapes")
    if shapes is None:
        raise CheckpointError(
            f"{loaded.path}: expected 'param_shapes', got none. The optimizer cannot be restored."
        )
    first = read_shard(paths, 0)
    world = world_of(first)
    if missing := [rank for rank in range(world) if rank not in paths]:
        raise CheckpointError(
            f"{loaded.path.parent}: expected optimizer files of {world} ranks, got none of {missing}."
        )
    shards = {0: first}
    guess = ShardedState(shards, world, shapes)
    for rank in sorted(_needed_ranks(guess, optimizer) - {0}):
        shards[rank] = read_shard(paths, rank)
    saved = ShardedState(shards, world, shapes)
    if not saved.order_is_known():
        shards |= {rank: read_shard(paths, rank) for rank in range(world) if rank not in shards}
        saved = ShardedState(shards, world, shapes)
        if not saved.order_is_known():
            raise CheckpointError(
                f"{loaded.path.parent}: the optimizer files disagree about which rank holds what."
            )
    return Loaded(loaded.path, model, first, saved)


def _needed_ranks(saved: ShardedState, optimizer: DeepSpeedZeroOptimizer) -> set[int]:
    """Which ranks wrote a part of what this rank owns, as far as names and elements agree."""
    parts, needed = optimizer.parts, set[int]()
    for group, layout in enumerate(parts.groups):
        numels = saved.numels(group) if group < len(saved.options) else {}
        for segment in layout.segments(*layout.shard_bounds(parts.shard)):
            name = parts.names[segment.slot.index]
            if numels.get(name) == segment.slot.numel:
                needed |= set(saved.ranks_of(group, name, segment.param_start, segment.numel))
    return needed


def read_shard(paths: Mapping[int, Path], rank: int) -> Mapping[str, Any]:
    """What a rank's optimizer file holds, mapped, not read.

    Args:
        paths: files by rank.
        rank: which one.

    Raises:
        CheckpointError: no such file, or another kind of file.
    """
    if rank not in paths:
        raise CheckpointError(
            f"{next(iter(paths.values())).parent}: expected an optimizer file of rank {rank}, got none."
        )
    content = read_torch_file(paths[rank])
    if not isinstance(content, Mapping) or "optimizer_state_dict" not in content:
        raise CheckpointError(
            f"{paths[rank]}: expected 'optimizer_state_dict', got none. Is it a checkpoint's file?"
        )
    return content["optimizer_state_dict"]


def world_of(shard: Mapping[str, Any]) -> int:
    """How many ranks saved a checkpoint, by one of its files. Stock writes a count, or one a group."""
    count = shard["partition_count"]
    return int(max(count, default=1)) if isinstance(count, (list, tuple)) else int(count)


def optimizer_files(folder: atomic.TagFolder) -> dict[int, Path]:
    """Rank -> its optimizer file."""
    found = ((optim_states_rank(name), folder.locate(name)) for name in folder.files())
    return dict(sorted((rank, path) for rank, path in found if rank is not None))


def _tags(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob(f"*/{MODEL_STATES}")) if folder.is_dir() else []


def _log_leftovers(folder: Path) -> None:
    """Tell of what interrupted saves left behind."""
    for tag in folder.iterdir():
        for path in atomic.leftovers(tag) if tag.is_dir() else ():
            logger.warning(
                "%s: left over by an interrupted save, %d bytes; nothing needs it, it may be deleted",
                path,
                path.stat().st_size,
            )


def load_into(loaded: Loaded, optimizer: DeepSpeedZeroOptimizer, shown: bool) -> None:
    """Copy a checkpoint's optimizer state into an optimizer; with a bar if it lasts and is to be shown."""
    assert loaded.optimizer is not None and loaded.shard is not None
    with byte_bar("load", shard_nbytes(optimizer, loaded.optimizer), shown) as bar:
        load_optimizer(optimizer, loaded.optimizer, bar.update)
    load_loss_scaler(optimizer, loaded.shard)
