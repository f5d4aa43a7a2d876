"""A run that is resumed from its checkpoint goes on exactly as the run that was not interrupted."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.compat.peer_job import train
from tests.distributed.checkpoint_cases import (
    JOBS,
    another_engine,
    assert_same,
    differences,
    snapshot,
    trained,
)
from tests.distributed.harness import run_distributed

BEFORE, AFTER = 3, 4


def _resume(folder):
    rank = dist.get_rank()
    for index, (name, job) in enumerate(JOBS.items()):
        path = Path(folder, str(index))
        engine = trained(job, BEFORE, rank)
        saved = snapshot(engine)
        assert engine.save_checkpoint(path) is True
        assert_same(snapshot(engine), saved, f"{name}: saving changed the engine")
        losses = train(engine, AFTER, rank)

        resumed = another_engine(job)
        assert differences(snapshot(resumed), saved), "the test needs another start"
        resumed.load_checkpoint(path)
        assert_same(snapshot(resumed), saved, name)
        assert train(resumed, AFTER, rank) == losses, name
        assert_same(snapshot(resumed), snapshot(engine), name)
    return True


@pytest.mark.parametrize("world", [1, 3])
def test_every_kind_of_job_resumes_bit_for_bit(world, tmp_path):
    run_distributed(world, _resume, str(tmp_path))


def _load_over(folder):
    """Into an engine that has trained already, twice, and saved again at once."""
    rank = dist.get_rank()
    for index, job in enumerate([JOBS["stage 2 offload bf16"], JOBS["client's AdamW"], JOBS["stage 0 bf16"]]):
        path = Path(folder, str(index))
        engine = trained(job, BEFORE, rank)
        saved = snapshot(engine)
        engine.save_checkpoint(path)
        train(engine, AFTER, rank)
        for _ in range(2):
            engine.load_checkpoint(path)
            assert_same(snapshot(engine), saved)
        engine.save_checkpoint(path, tag="again")
        train(engine, 1, rank)
        engine.load_checkpoint(path, tag="again")
        assert_same(snapshot(engine), saved)


def test_loading_rewinds_an_engine_that_has_trained_and_saving_right_after_loading_works(tmp_path):
    run_distributed(2, _load_over, str(tmp_path))


def _before_the_first_step(folder):
    rank = dist.get_rank()
    for index, name in enumerate(
        ["stage 2 offload bf16", "SGD with momentum", "client's AdamW", "stage 0 fp32"]
    ):
        job, path = JOBS[name], Path(folder, str(index))
        engine = trained(job, 0, rank)
        saved = snapshot(engine)
        engine.save_checkpoint(path)
        losses = train(engine, AFTER, rank)
        resumed = another_engine(job)
        train(resumed, 1, rank)
        resumed.load_checkpoint(path)
        ours = snapshot(resumed)
        # An optimizer that makes its state at its first step has zeros now where it had nothing: the same to
        # it.
        assert {name.rpartition(".")[2] for name in differences(ours, saved)} <= {
            "exp_avg",
            "exp_avg_sq",
            "momentum_buffer",
            "steps",
        }, name
        assert train(resumed, AFTER, rank) == losses, name


def test_a_checkpoint_from_before_the_first_step_resumes(tmp_path):
    run_distributed(2, _before_the_first_step, str(tmp_path))


def _mid_accumulation(folder):
    job, rank = JOBS["accumulation 2"], dist.get_rank()
    engine = trained(job, 1, rank)
    source = torch.Generator().manual_seed(1)
    engine.backward(engine(*torch.randint(0, 5, (2, 6), generator=source)))
    engine.step()
    assert engine.micro_steps == 3
    engine.save_checkpoint(folder)
    resumed = another_engine(job)
    resumed.load_checkpoint(folder)
    assert resumed.micro_steps == 2
    assert not resumed.is_gradient_accumulation_boundary()


def test_an_accumulation_under_way_at_the_save_starts_over(tmp_path):
    """Gradients are not saved, as in stock: the step that was being collected is collected anew."""
    run_distributed(2, _mid_accumulation, str(tmp_path))
