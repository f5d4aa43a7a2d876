"""The harness itself: results in rank order, every failure shown, no hang outlives the limit."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import run_distributed


def _sum_of_ranks(base: int) -> tuple[int, float]:
    total = torch.tensor([float(base + dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 does not like this")
    dist.barrier()


def _die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os._exit(7)


def _hang_on_rank_1() -> None:
    if dist.get_rank() == 0:
        return
    import time

    time.sleep(600)


def _environment() -> tuple[str, str, bool]:
    return os.environ["RANK"], os.environ["GREETING"], dist.is_initialized()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_come_back_in_rank_order(world):
    total = sum(10.0 + rank for rank in range(world))
    assert run_distributed(world, _sum_of_ranks, 10) == [(rank, total) for rank in range(world)]


def test_the_traceback_of_a_failing_rank_is_shown():
    with pytest.raises(AssertionError, match="rank 1 does not like this"):
        run_distributed(2, _fail_on_rank_1)


def test_a_dead_rank_is_reported_with_its_exit_code():
    with pytest.raises(AssertionError, match="rank 0: died with exit code 7"):
        run_distributed(2, _die_on_rank_0)


def test_a_hang_ends_at_the_limit_and_shows_where_it_stood():
    with pytest.raises(
        AssertionError, match=r"(?s)ranks 1 of 2 failed.*did not finish in time.*_hang_on_rank_1"
    ):
        run_distributed(2, _hang_on_rank_1, timeout_s=5)


def test_ranks_can_start_without_a_process_group():
    assert run_distributed(2, _environment, env={"GREETING": "hi"}, process_group=False) == [
        ("0", "hi", False),
        ("1", "hi", False),
    ]
