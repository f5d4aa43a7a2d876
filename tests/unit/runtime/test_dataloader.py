"""The built-in loader: torch's options, every rank its part, no forked workers."""

import multiprocessing

import pytest
import torch
from torch.utils.data import IterableDataset

from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.utils import RepeatingLoader

TEN = list(range(10))


def values(loader):
    return [batch.tolist() for batch in loader]


def test_a_pass_holds_every_sample_once():
    batches = values(DeepSpeedDataLoader(TEN, 4))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(sum(batches, [])) == TEN


def test_drop_last_leaves_the_short_batch_out():
    loader = DeepSpeedDataLoader(TEN, 4, drop_last=True)
    assert [len(batch) for batch in values(loader)] == [4, 4]
    assert len(loader) == 2


def test_each_pass_is_shuffled_anew_and_repeatably():
    first = DeepSpeedDataLoader(TEN, 10)
    second = DeepSpeedDataLoader(TEN, 10)
    passes = [values(first)[0] for _ in range(3)]
    assert passes == [values(second)[0] for _ in range(3)]
    assert len({tuple(one) for one in passes}) == 3
    second.set_epoch(1)
    assert values(second)[0] == passes[1]


def test_order_is_kept_without_shuffle():
    assert values(DeepSpeedDataLoader(TEN, 4, shuffle=False)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_samples_evenly(world):
    parts = [
        sum(values(DeepSpeedDataLoader(TEN, 2, data_parallel_rank=rank, data_parallel_world_size=world)), [])
        for rank in range(world)
    ]
    assert {len(part) for part in parts} == {-(-10 // world)}
    assert set(sum(parts, [])) == set(TEN)


def test_a_sampler_and_a_collate_function_may_be_given():
    loader = DeepSpeedDataLoader(
        TEN, 2, sampler=[7, 3, 1], collate_fn=lambda samples: torch.tensor(samples) * 10
    )
    assert values(loader) == [[70, 30], [10]]


def test_an_iterable_dataset_is_read_as_it_comes():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(TEN)

    assert sum(values(DeepSpeedDataLoader(Stream(), 4)), []) == TEN


class _StartMethod:
    """A dataset whose samples say how their process was started."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return type(multiprocessing.current_process()).__name__


def test_workers_do_not_start_by_fork():
    assert next(iter(DeepSpeedDataLoader(_StartMethod(), 1))) == ["_MainProcess"]
    loader = DeepSpeedDataLoader(_StartMethod(), 1, num_workers=1)
    assert next(iter(loader)) == ["ForkServerProcess"]


def test_next_starts_a_pass_and_ends_it():
    loader = DeepSpeedDataLoader(TEN, 10)
    first = next(loader)
    with pytest.raises(StopIteration):
        next(loader)
    assert next(loader).tolist() != first.tolist()


def test_a_repeating_loader_starts_over():
    batches = iter(RepeatingLoader([1, 2]))
    assert [next(batches) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(StopIteration):
        next(RepeatingLoader([]))
