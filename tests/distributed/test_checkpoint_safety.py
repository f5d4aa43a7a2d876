"""What goes wrong with a checkpoint is one clear error on every rank, and nothing changes or is lost."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed.runtime.checkpoint import torch_file
from deepspeed.runtime.checkpoint.names import CheckpointError
from tests.compat.peer_job import train
from tests.distributed.checkpoint_cases import JOBS, another_engine, assert_same, snapshot, trained
from tests.distributed.harness import run_distributed
from tests.small_engine import captured_log

JOB = JOBS["stage 2 offload bf16"]
MODEL_FILE = "mp_rank_00_model_states.pt"
OPTIM_FILE = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def _same_error_on_every_rank(call):
    """Run a call that must fail; returns its words after checking that all ranks got the same."""
    with pytest.raises(CheckpointError) as caught:
        call()
    words = [None] * dist.get_world_size()
    dist.all_gather_object(words, str(caught.value))
    assert len(set(words)) == 1, words
    return words[0]


def _truncate(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 100)


def _flip_a_bit_of_a_tensor(path):
    content = torch.load(path, mmap=True, weights_only=True)
    content = content.get("module") or content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    tensor = max(content.values() if hasattr(content, "values") else content, key=torch.numel)
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    whole = bytearray(path.read_bytes())
    whole[whole.find(data) + 5] ^= 4
    path.write_bytes(whole)


class _Foreign:
    """A class that nobody named to torch; unpickling it would run `__setstate__`."""

    def __setstate__(self, state):
        raise AssertionError("ran what was pickled")

    def __getstate__(self):
        return {"a": 1}


DAMAGES = {
    "model file truncated": (MODEL_FILE, _truncate, "truncated or foreign"),
    "optimizer file truncated": (OPTIM_FILE, _truncate, "truncated or foreign"),
    "model file empty": (MODEL_FILE, lambda path: path.write_bytes(b""), "truncated or foreign"),
    "optimizer file of another program": (OPTIM_FILE, lambda path: path.write_text("hello"), "foreign"),
    "optimizer file of torch, but no checkpoint": (
        OPTIM_FILE,
        lambda path: torch.save({"x": 1}, path),
        "expected 'optimizer_state_dict'",
    ),
    "model file of torch, but no checkpoint": (MODEL_FILE, lambda path: torch.save([1], path), "'module'"),
    "a class that is not allowed": (OPTIM_FILE, lambda path: torch.save(_Foreign(), path), "_Foreign"),
    "a bit of the weights flipped": (MODEL_FILE, _flip_a_bit_of_a_tensor, "damaged"),
    "a bit of the masters flipped": (OPTIM_FILE, _flip_a_bit_of_a_tensor, "damaged"),
    "optimizer file of one rank missing": (OPTIM_FILE, Path.unlink, "[1]"),
    "model file missing": (MODEL_FILE, Path.unlink, MODEL_FILE),
}


def _damaged(folder):
    rank = dist.get_rank()
    engine = trained(JOB, 2, rank)
    good = Path(folder, "good")
    engine.save_checkpoint(good)
    train(engine, 1, rank)
    before = snapshot(engine)
    for index, (name, (file, damage, words)) in enumerate(DAMAGES.items()):
        path = Path(folder, str(index))
        if rank == 0:
            shutil.copytree(good, path)
            damage(path / "global_step2" / file)
        dist.barrier()
        message = _same_error_on_every_rank(lambda path=path: engine.load_checkpoint(path))
        assert words in message and "load_checkpoint" in message, f"{name}: {message}"
        assert_same(snapshot(engine), before, name)
    train(engine, 1, rank)


def test_a_damaged_or_foreign_file_is_refused_on_every_rank_before_anything_changes(tmp_path):
    run_distributed(2, _damaged, str(tmp_path))


def _unfit(folder):
    """A checkpoint of another model, other groups, another optimizer."""
    rank = dist.get_rank()
    engine = trained(JOB, 2, rank)
    engine.save_checkpoint(folder)
    other = trained(JOBS["SGD with momentum"], 1, rank)
    other.save_checkpoint(folder, tag="sgd", save_latest=False)
    before = snapshot(engine)
    message = _same_error_on_every_rank(lambda: engine.load_checkpoint(folder, tag="sgd"))
    assert "expected ['exp_avg', 'exp_avg_sq'], got ['momentum_buffer']" in message
    message = _same_error_on_every_rank(lambda: engine.load_checkpoint(folder, tag="absent"))
    assert "'absent'" in message and "['global_step2', 'sgd']" in message

    class Larger(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(3, 8)

    import deepspeed
    from tests.compat.peer_job import config

    larger = deepspeed.initialize(model=Larger(), config=config(JOB))[0]
    message = _same_error_on_every_rank(lambda: larger.load_checkpoint(folder))
    assert "inner.weight: expected shape (8, 3), got (7, 3)" in message
    assert "embed.weight: not in the model" in message
    assert "param_groups: expected 1 groups, got 2" in message
    assert_same(snapshot(engine), before)


def test_a_checkpoint_that_does_not_fit_is_refused_with_every_reason(tmp_path):
    run_distributed(2, _unfit, str(tmp_path))


def _full_disk(folder, rank_without_space):
    """The disk fills up after some pieces, on one rank."""
    rank = dist.get_rank()
    engine = trained(JOB, 2, rank)
    engine.save_checkpoint(folder, tag="tag")
    saved = snapshot(engine)
    train(engine, 1, rank)
    real, calls = os.pwrite, 0

    def pwrite(*args):
        nonlocal calls
        calls += 1
        if rank == rank_without_space and calls > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    torch_file.os.pwrite = pwrite
    try:
        for tag in ("tag", "new"):
            message = _same_error_on_every_rank(lambda tag=tag: engine.save_checkpoint(folder, tag=tag))
            assert "No space left on device" in message and f"rank {rank_without_space}" in message
    finally:
        torch_file.os.pwrite = real
    assert sorted(os.listdir(Path(folder, "new"))) == []
    assert sorted(os.listdir(Path(folder, "tag"))) == sorted(
        [MODEL_FILE, OPTIM_FILE, OPTIM_FILE.replace("rank_1", "rank_0")]
    )
    resumed = another_engine(JOB)
    resumed.load_checkpoint(folder)
    assert_same(snapshot(resumed), saved)
    engine.save_checkpoint(folder, tag="new")


@pytest.mark.parametrize("rank_without_space", [0, 1])
def test_a_full_disk_leaves_the_previous_checkpoint_and_no_debris(rank_without_space, tmp_path):
    run_distributed(2, _full_disk, str(tmp_path), rank_without_space)


def _different_tags(folder):
    rank = dist.get_rank()
    engine = trained(JOB, 1, rank)
    for save in (
        lambda: engine.save_checkpoint(folder, tag=f"step{rank}"),
        lambda: engine.load_checkpoint(folder, tag=f"step{rank}"),
    ):
        message = _same_error_on_every_rank(save)
        assert "tag: expected the same on every rank, got ['step0', 'step1']" in message
    message = _same_error_on_every_rank(lambda: engine.save_checkpoint(Path(folder, str(rank)), tag="a"))
    assert "save_dir" in message
    assert os.listdir(folder) == []
    engine.save_checkpoint(folder)


def test_ranks_that_disagree_on_the_tag_all_say_so(tmp_path):
    run_distributed(2, _different_tags, str(tmp_path))


def _on_one_rank(folder, caller):
    """One rank saves or loads alone; afterwards all can train and save together as before."""
    rank = dist.get_rank()
    engine = trained(JOB, 1, rank)
    if rank == caller:
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(CheckpointError, match="expected all 2 ranks to call it") as caught:
                call(folder)
            assert f"rank {1 - caller}" in str(caught.value) and call.__name__ in str(caught.value)
            assert "DS_CHECKPOINT_TIMEOUT_S" in str(caught.value)
    assert os.listdir(folder) == []
    dist.barrier()
    train(engine, 1, rank)
    engine.save_checkpoint(folder)
    saved = snapshot(engine)
    resumed = another_engine(JOB)
    resumed.load_checkpoint(folder)
    assert_same(snapshot(resumed), saved)


@pytest.mark.parametrize("caller", [0, 1])
def test_a_save_on_one_rank_only_ends_in_an_error_that_says_so(caller, tmp_path):
    run_distributed(2, _on_one_rank, str(tmp_path), caller, env={"DS_CHECKPOINT_TIMEOUT_S": "2"})


def _slow_writer(folder):
    """A rank that needs longer than the limit, but makes progress, is waited for."""
    rank = dist.get_rank()
    engine = trained(JOB, 1, rank)
    if rank == 1:
        import time

        real = os.pwrite

        def pwrite(*args):
            time.sleep(0.4)
            return real(*args)

        torch_file.os.pwrite = pwrite
    engine.save_checkpoint(folder)


def test_a_slow_rank_that_makes_progress_is_waited_for(tmp_path):
    run_distributed(2, _slow_writer, str(tmp_path), env={"DS_CHECKPOINT_TIMEOUT_S": "2"})


def _no_latest(folder):
    rank = dist.get_rank()
    engine = trained(JOB, 1, rank)
    with captured_log() as messages:
        assert engine.load_checkpoint(Path(folder, "nowhere")) == (None, None)
    assert any("latest is absent" in message for message in messages) == (rank == 0)
    engine.save_checkpoint(folder, tag="mine", save_latest=False)
    saved = snapshot(engine)
    assert engine.load_checkpoint(folder) == (None, None)
    path, client_state = another_engine(JOB).load_checkpoint(folder, tag="mine")
    assert path == str(Path(folder, "mine", MODEL_FILE)) and isinstance(client_state, dict)
    assert_same(snapshot(engine), saved)


def test_without_latest_nothing_is_loaded_and_a_tag_works(tmp_path):
    run_distributed(2, _no_latest, str(tmp_path))
