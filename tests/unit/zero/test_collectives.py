"""What the collectives do without a second rank, and how they add up."""

import pytest
import torch

from deepspeed.runtime.zero import collectives
from deepspeed.runtime.zero.collectives import Comm

ALONE = Comm(None, 0, 1, True)


def test_without_torch_distributed_the_world_is_one():
    assert Comm.of(None) == ALONE
    assert ALONE.global_rank(0) == 0


@pytest.mark.parametrize("numel", [0, 1, 7])
def test_a_world_of_one_changes_nothing_and_waits_for_nobody(numel):
    flat = torch.arange(float(numel))
    collectives.launch_reduce_mean(flat, [0, numel], ALONE)()
    collectives.launch_all_reduce_mean(flat, ALONE)()
    collectives.broadcast(flat, 0, ALONE)
    assert torch.equal(flat, torch.arange(float(numel)))
    assert collectives.all_reduce_sum([1.5, 2.0], ALONE, torch.device("cpu")) == [1.5, 2.0]


@pytest.mark.parametrize("numel", [0, 1, 4, 5, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rows_are_averaged_in_order_and_rounded_once(monkeypatch, dtype, numel):
    monkeypatch.setattr(collectives, "_SUM_TILE_NUMEL", 4)
    rows = torch.randn(3, numel, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    before = rows.clone()
    mean = torch.full((numel,), torch.nan, dtype=dtype)
    collectives._mean_of_rows(rows, mean)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = (rows[0].to(wide) + rows[1].to(wide) + rows[2].to(wide)) / 3
    assert torch.equal(mean, expected.to(dtype))
    assert torch.equal(rows, before), "the received rows stay as they came"


@pytest.mark.parametrize(("dtype", "largest"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_16_bit_rows_are_summed_wider_than_they_are(dtype, largest):
    rows = torch.tensor([[largest], [1.0], [1.0], [2.0]], dtype=dtype)
    mean = torch.empty(1, dtype=dtype)
    collectives._mean_of_rows(rows, mean)
    assert mean.item() == (largest + 4) / 4, "in its own type the sum would have stopped at the first row"


def test_a_sum_that_overflows_16_bits_on_the_way_does_not_overflow_in_the_mean():
    rows = torch.full((4, 2), 60000.0, dtype=torch.float16)
    mean = torch.empty(2, dtype=torch.float16)
    collectives._mean_of_rows(rows, mean)
    assert torch.equal(mean, rows[0])


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_value_that_is_not_finite_stays_so(value):
    mean = torch.empty(2)
    collectives._mean_of_rows(torch.tensor([[1.0, 1.0], [value, 1.0]]), mean)
    assert not torch.isfinite(mean[0]) and mean[1] == 1.0
