"""`checkpoint.async_save`: training goes on while the optimizer's file is written, as it was at the save."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

import deepspeed
from deepspeed.runtime.checkpoint import save as save_module
from deepspeed.runtime.checkpoint import torch_file
from deepspeed.runtime.checkpoint.names import CheckpointError
from tests.compat.peer_job import config, groups, train
from tests.distributed.checkpoint_cases import JOBS, another_engine, assert_same, snapshot
from tests.distributed.harness import run_distributed

JOB = JOBS["stage 2 offload bf16"]


def _engine(job=JOB):
    from tests.compat.peer_job import Model, torch

    torch.manual_seed(0)
    model = Model()
    settings = config(job) | {"checkpoint": {"async_save": True}}
    settings["zero_optimization"]["allgather_bucket_size"] = 16  # many small tiles
    return deepspeed.initialize(model=model, config=settings, model_parameters=groups(model))[0]


class _Pause:
    """Lets the writer of optimizer files go on one tile at a time."""

    def __init__(self):
        self.reached, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self._real = save_module._in_lanes
        save_module.LANE_TILE_NUMEL = 8
        save_module._in_lanes = self._paused

    def _paused(self, lanes, gate, plan, fd):
        passed = gate.passed

        def pausing(group, end):
            self.reached.release()
            self.go.acquire()
            passed(group, end)

        gate.passed = pausing
        return self._real(lanes, gate, plan, fd)

    def end(self):
        for _ in range(1000):
            self.go.release()
        save_module._in_lanes = self._real


def _overlap(folder):
    rank = dist.get_rank()
    engine, straight = _engine(), _engine()
    for one in (engine, straight):
        train(one, 2, rank)
    saved = snapshot(engine)
    pause = _Pause()
    engine.save_checkpoint(folder)
    pause.reached.acquire()  # the first tile is on disk, the second is not
    losses = []
    trainer = threading.Thread(target=lambda: losses.extend(train(engine, 1, rank)))
    trainer.start()
    trainer.join(1.0)
    assert trainer.is_alive(), "the step waits for what has not been written"
    assert not os.path.exists(os.path.join(folder, "latest"))
    pause.end()
    trainer.join()
    losses += train(engine, 3, rank)
    engine.wait_for_checkpoint()
    assert losses == train(straight, 4, rank)
    assert_same(snapshot(engine), snapshot(straight), "training beside a save")
    resumed = another_engine(JOB)
    resumed.load_checkpoint(folder)
    assert_same(snapshot(resumed), saved, "what was saved")


def test_a_step_waits_tile_by_tile_and_neither_side_changes_the_others_bits(tmp_path):
    run_distributed(2, _overlap, str(tmp_path))


def _next_call_waits(folder):
    rank = dist.get_rank()
    engine = _engine()
    for step in range(3):
        train(engine, 1, rank)
        saved = snapshot(engine)
        engine.save_checkpoint(folder, tag=str(step))
    engine.load_checkpoint(folder)
    assert_same(snapshot(engine), saved)
    engine.save_checkpoint(folder, tag="last")
    engine.destroy()
    assert Path(folder, "latest").read_text() == "last"


def test_the_next_save_load_or_destroy_waits_for_the_one_under_way(tmp_path):
    run_distributed(2, _next_call_waits, str(tmp_path))


def _fails(folder):
    rank = dist.get_rank()
    engine = _engine()
    train(engine, 1, rank)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    saved = snapshot(engine)
    train(engine, 1, rank)
    real = os.pwrite

    def pwrite(fd, data, start):
        if rank == 1 and threading.current_thread().name == "checkpoint-save":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, start)

    torch_file.os.pwrite = pwrite
    engine.save_checkpoint(folder)
    train(engine, 1, rank)
    with pytest.raises(CheckpointError, match="rank 1.*No space left on device"):
        engine.wait_for_checkpoint()
    torch_file.os.pwrite = real
    resumed = another_engine(JOB)
    resumed.load_checkpoint(folder)
    assert_same(snapshot(resumed), saved)


def test_a_save_that_fails_behind_training_is_an_error_of_the_next_call_on_every_rank(tmp_path):
    run_distributed(2, _fails, str(tmp_path))


def _others(folder):
    """Optimizers that step as a whole, and state on the device, wait for the whole save."""
    rank = dist.get_rank()
    for index, name in enumerate(["SGD with momentum", "Lion", "stage 2 device fp16", "stage 0 bf16"]):
        engine = _engine(JOBS[name])
        train(engine, 2, rank)
        saved = snapshot(engine)
        path = os.path.join(folder, str(index))
        engine.save_checkpoint(path)
        train(engine, 2, rank)
        engine.wait_for_checkpoint()
        resumed = another_engine(JOBS[name])
        resumed.load_checkpoint(path)
        assert_same(snapshot(resumed), saved, name)


def test_every_other_kind_of_state_is_saved_as_it_was_at_the_call(tmp_path):
    run_distributed(2, _others, str(tmp_path))
