"""A job that is killed at any point of a save leaves a checkpoint that loads, and says what is left over.

Here at every point in turn, on one rank or on all; `make torture` does it at random moments.
"""

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from deepspeed.runtime.checkpoint import atomic, torch_file
from tests.compat.peer_job import train
from tests.distributed.checkpoint_cases import JOBS, another_engine, assert_same, snapshot, trained
from tests.distributed.harness import run_distributed
from tests.small_engine import captured_log

JOB = JOBS["stage 2 offload bf16"]
SILENT = {"DS_CHECKPOINT_TIMEOUT_S": "1"}


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _before(module, name, count=1):
    """Die at the count-th call of a function, before it does anything."""
    real, calls = getattr(module, name), 0

    def dying(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == count:
            _die()
        return real(*args, **kwargs)

    setattr(module, name, dying)


LAST = "before latest changes"
# Point of death -> how to arrange it, the ranks that die there, whether the new checkpoint counts by then.
POINTS = {
    "in the middle of writing": (lambda: _before(torch_file, "_pwrite", 4), (0, 1), False),
    "before flushing": (lambda: _before(torch_file.os, "fsync"), (0, 1), False),
    "one rank, in the middle of writing": (lambda: _before(torch_file, "_pwrite", 4), (1,), False),
    "before the files count": (lambda: _before(atomic, "write_record"), (0,), False),
    "before any file has its name": (lambda: _before(atomic, "rename_temporary"), (0, 1), True),
    "when only rank 0's files have their names": (lambda: _before(atomic, "rename_temporary"), (1,), True),
    "between two renames": (lambda: _before(atomic.os, "replace", 3), (0,), True),
    "before the record is removed": (lambda: _before(atomic, "remove_record"), (0,), True),
    LAST: (lambda: _before(atomic, "replace_text", 3), (0,), True),
}


def _save(folder, tag):
    engine = trained(JOB, 2, dist.get_rank())
    engine.save_checkpoint(folder, tag=tag)
    return snapshot(engine)


def _die_while_saving(folder, tag, point):
    rank = dist.get_rank()
    engine = another_engine(JOB)
    engine.load_checkpoint(folder)
    train(engine, 1, rank)
    arrange, ranks, _ = POINTS[point]
    if rank in ranks:
        arrange()
    engine.save_checkpoint(folder, tag=tag)


def _load(folder):
    engine = another_engine(JOB)
    with captured_log() as messages:
        engine.load_checkpoint(folder)
    return snapshot(engine), messages


def _save_again(folder, tag):
    engine = another_engine(JOB)
    engine.load_checkpoint(folder)
    before = snapshot(engine)
    with captured_log() as messages:
        engine.save_checkpoint(folder, tag=tag)
    return before, messages


CASES = [(point, "same") for point in POINTS]
CASES += [(point, "another") for point in ("in the middle of writing", "before any file has its name", LAST)]


@pytest.mark.parametrize(("point", "tag"), CASES)
def test_a_kill_at_any_point_leaves_a_whole_checkpoint(point, tag, tmp_path):
    """Saved under a tag of its own, and over the checkpoint that `latest` names."""
    folder = str(tmp_path)
    old = run_distributed(2, _save, folder, "same")
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_distributed(2, _die_while_saving, folder, tag, point, env=SILENT)
    counts = POINTS[point][2] and tag == "same"
    left = [path.name for path in Path(folder).rglob("*.tmp")]
    loaded = run_distributed(2, _load, folder)
    for rank, (state, _) in enumerate(loaded):
        if counts:
            assert state["counters"][0] == 3, "the new one"
        else:
            assert_same(state, old[rank], point)
    if not POINTS[point][2]:
        assert left, "the test must leave something"
        for name in left:
            assert any(name in message and "left over" in message for message in loaded[0][1]), name

    again = run_distributed(2, _save_again, folder, tag)
    after = run_distributed(2, _load, folder)
    for (before, _), (state, messages) in zip(again, after, strict=True):
        assert_same(state, before, "saved again")
        assert not [message for message in messages if "left over" in message]
    assert not list(Path(folder).rglob("*.tmp")) and not list(Path(folder).rglob(".commit*"))
