"""The steps of a save, the same on every rank: agree, write, agree, switch."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint import atomic
from deepspeed.runtime.checkpoint.agreement import AbsentRankError, Agreement, attempt
from deepspeed.runtime.checkpoint.background import PendingSave
from deepspeed.runtime.checkpoint.names import (
    LATEST,
    MODEL_STATES,
    SCRIPT,
    CheckpointError,
    optim_states_name,
    optim_states_rank,
)
from deepspeed.runtime.checkpoint.optim_states import optim_lanes
from deepspeed.runtime.checkpoint.progress import byte_bar
from deepspeed.runtime.checkpoint.torch_file import TensorSource, TorchFile, plan_torch_file, write_planned
from deepspeed.runtime.zero.change_gate import ChangeGate
from deepspeed.runtime.zero.collectives import Comm

logger = logging.getLogger("DeepSpeed")

_CALL = "save_checkpoint"
# Elements of each tensor of a group that are written before the next tensor's: a step waits for as many at
# most.
LANE_TILE_NUMEL = 1 << 22
_SCRIPT_TEXT = '''#!/usr/bin/env python
"""Writes the fp32 weights of this checkpoint: python zero_to_fp32.py . output_folder [--help]"""

import runpy

runpy.run_module("deepspeed.utils.zero_to_fp32", run_name="__main__")
'''


@dataclass(frozen=True)
class SaveRequest:
    """What is to be saved where.

    Args:
        folder: the checkpoint folder.
        tag: name of the subfolder.
        save_latest: whether `latest` is to name it.
        sharded: whether every rank writes an optimizer file (stages 1 and 2).
        bf16: whether their names carry the prefix.
        node_local: whether each node has its own file system.
    """

    folder: Path
    tag: str
    save_latest: bool
    sharded: bool
    bf16: bool
    node_local: bool


@dataclass(frozen=True)
class _Planned:
    """A file on its way."""

    name: str
    path: Path  # its temporary name
    plan: TorchFile


@dataclass
class _Started:
    """A save that all ranks have come to."""

    save_id: str
    contents: dict[str, Any] = field(default_factory=dict)
    planned: list[_Planned] = field(default_factory=list)
    error: Exception | None = None  # what has gone wrong here so far


# Makes the content of a rank's files: file name -> nested containers.
Contents = Callable[[], dict[str, Any]]


class Saver:
    """Writes checkpoints.

    Pattern: the ranks first make sure that all of them are here and mean the same checkpoint. Each writes its
    files under temporary names and flushes them. Only when all have succeeded does the folder switch (see
    `atomic`), and `latest` after it. A failure on any rank raises the same error on all, and what stood there
    before still stands. Memory: one piece of a tensor at a time, `PIECE_NBYTES`, and only for tensors that
    are on a device.

    Args:
        comm: the data-parallel ranks.
        agreement: how they agree.
    """

    def __init__(self, comm: Comm, agreement: Agreement) -> None:
        self._comm = comm
        self._agreement = agreement

    def save(self, request: SaveRequest, contents: Contents) -> None:
        """Save on every rank.

        Args:
            request: what and where; the same on every rank.
            contents: makes the content of this rank's files.

        Raises:
            CheckpointError: the same on every rank; nothing has changed.
        """
        started = self._start(request, contents)
        self._complete(request, started, partial(self._write_all, started))

    def save_later(self, request: SaveRequest, contents: Contents, gate: ChangeGate) -> PendingSave:
        """The same, but the optimizer's file is written by a thread, behind which training goes on.

        Args:
            request: what and where; the same on every rank.
            contents: makes the content of this rank's files.
            gate: holds back changes of what has not been written.

        Returns:
            The save under way; it raises what `save` would raise when it is waited for.

        Raises:
            CheckpointError: the ranks are not all here for the same checkpoint.
        """
        try:
            started = self._start(request, contents)
            started.error = started.error or attempt(partial(self._write_model, started))[1]
        except BaseException:
            gate.open()
            raise

        def finish() -> None:
            try:
                self._complete(request, started, partial(self._write_in_lanes, started, gate))
            finally:
                gate.open()

        return PendingSave(finish)

    def is_committer(self, request: SaveRequest) -> bool:
        """Whether this rank writes what all ranks of its file system share."""
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        return self._comm.rank == 0 or (request.node_local and local_rank == 0)

    def _begin(self, request: SaveRequest) -> str:
        """Make sure that all ranks are here for the same checkpoint; returns the save's identity."""
        own = {"tag": request.tag, "folder": str(request.folder), "save_id": uuid.uuid4().hex[:8]}
        messages = self._agreement.exchange(_CALL, own, arriving=True)
        for key in ("tag",) if request.node_local else ("tag", "folder"):
            values = [message[key] for message in messages]
            if len(set(values)) > 1:
                raise CheckpointError(
                    f"{_CALL}: {'tag' if key == 'tag' else 'save_dir'}: expected the same on every rank, got "
                    f"{values} in rank order. Pass one that all ranks know, such as the step."
                )
        self._agreement.together(_CALL, lambda: self._prepare(request))
        return messages[0]["save_id"]

    def _prepare(self, request: SaveRequest) -> None:
        """Complete or clear away what an interrupted save left under this tag."""
        folder = request.folder / request.tag
        if not self.is_committer(request):
            return
        folder.mkdir(parents=True, exist_ok=True)
        before = atomic.TagFolder.open(folder)
        if before.save_id is not None:
            atomic.rename_temporary(folder, before.names, before.save_id)
            atomic.remove_record(folder)
        for path in atomic.leftovers(folder):
            logger.warning(
                "%s: left over by an interrupted save, %d bytes; removed", path, path.stat().st_size
            )
            path.unlink()

    def _start(self, request: SaveRequest, contents: Contents) -> _Started:
        """Meet the other ranks, and fix what this one will write."""
        started = _Started(self._begin(request))
        folder = request.folder / request.tag

        def plan() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            started.contents = contents()
            started.planned = [
                _Planned(
                    name, folder / atomic.temporary_name(name, started.save_id), plan_torch_file(content)
                )
                for name, content in started.contents.items()
            ]

        started.error = attempt(plan)[1]
        return started

    def _complete(self, request: SaveRequest, started: _Started, write: Callable[[], None]) -> None:
        """Write, agree that all have written, switch."""
        folder, save_id = request.folder / request.tag, started.save_id
        names = [item.name for item in started.planned]
        with self._agreement.at_work():
            error = started.error or attempt(write)[1]
        try:
            self._agreement.agree(_CALL, error)
            self._let_count(request, save_id)
        except AbsentRankError:
            raise  # the absent rank may have let the files count: they stay
        except CheckpointError:
            self._discard(folder, save_id, names)
            raise
        self._settle(request, save_id, names)
        self._agreement.part()

    def _write_all(self, started: _Started) -> None:
        """Write this rank's files, one after the other."""
        total = sum(item.plan.tensor_nbytes for item in started.planned)
        try:
            with byte_bar("save", total, self._comm.rank == 0) as bar:
                for item in started.planned:
                    write_planned(item.path, item.plan, bar.update)
        except BaseException:
            for item in started.planned:
                item.path.unlink(missing_ok=True)
            raise

    def _write_model(self, started: _Started) -> None:
        """Write the model file, if it is this rank's to write: weights and buffers change as training goes
        on."""
        for item in started.planned:
            if item.name == MODEL_STATES:
                write_planned(item.path, item.plan)

    def _write_in_lanes(self, started: _Started, gate: ChangeGate) -> None:
        """Write the optimizer's file in the order in which a step changes what is in it."""
        for item in started.planned:
            if item.name != MODEL_STATES:
                lanes = optim_lanes(started.contents[item.name])
                write_planned(item.path, item.plan, order=partial(_in_lanes, lanes, gate))

    def _discard(self, folder: Path, save_id: str, names: Sequence[str]) -> None:
        """Remove files that will not count."""
        for name in names:
            (folder / atomic.temporary_name(name, save_id)).unlink(missing_ok=True)

    def _let_count(self, request: SaveRequest, save_id: str) -> None:
        """All files are there: from here on they are the checkpoint."""
        self._agreement.together(_CALL, lambda: self._write_record(request, save_id))

    def _write_record(self, request: SaveRequest, save_id: str) -> None:
        if self.is_committer(request):
            atomic.write_record(request.folder / request.tag, save_id, self._names(request))

    def _settle(self, request: SaveRequest, save_id: str, own_names: Sequence[str]) -> None:
        """Give the files their own names, and let `latest` say so."""
        folder = request.folder / request.tag
        self._agreement.together(_CALL, lambda: atomic.rename_temporary(folder, own_names, save_id))
        self._agreement.together(_CALL, lambda: self._finish(request))

    def _finish(self, request: SaveRequest) -> None:
        """Clear away an older checkpoint's files of the same tag, then let `latest` name this one."""
        if not self.is_committer(request):
            return
        folder, names = request.folder / request.tag, self._names(request)
        for entry in os.scandir(folder):
            if optim_states_rank(entry.name) is not None and entry.name not in names:
                os.unlink(entry.path)
        atomic.remove_record(folder)
        if request.sharded:
            atomic.replace_text(request.folder / SCRIPT, _SCRIPT_TEXT, 0o744)
        if request.save_latest:
            atomic.replace_text(request.folder / LATEST, request.tag)

    def _names(self, request: SaveRequest) -> list[str]:
        """The files of the checkpoint, over all ranks."""
        ranks = range(self._comm.world) if request.sharded else ()
        return [MODEL_STATES, *(optim_states_name(rank, request.bf16) for rank in ranks)]


def _in_lanes(
    lanes: Sequence[Sequence[TensorSource]], gate: ChangeGate, plan: TorchFile, fd: int
) -> Iterator[int]:
    """Write what a step changes together, a tile of all of a group's tensors after the other.

    Args:
        lanes: for each parameter group the tensors with one element for each of its shard's.
        gate: is told how far the writing has come.
        plan: the file.
        fd: open for writing.
    """
    records = {id(record.source): record for record in plan.tensors}
    for group, sources in enumerate(lanes):
        numel = max((source.tensor.numel() for source in sources), default=0)
        for end in range(LANE_TILE_NUMEL, numel + LANE_TILE_NUMEL, LANE_TILE_NUMEL):
            for source in sources:
                record = records.get(id(source))
                if record is not None:
                    limit = min(end * source.tensor.element_size(), record.nbytes)
                    yield from plan.write(fd, record, limit)
            gate.passed(group, min(end, numel))
    for record in plan.tensors:
        yield from plan.write(fd, record)
