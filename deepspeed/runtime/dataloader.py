"""The loader that ``initialize(training_data=...)`` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from deepspeed.utils.repeating_loader import RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]


class DeepSpeedDataLoader:
    """Batches of this rank's part of a dataset: torch's DataLoader with a distributed sampler.

    Every pass shuffles anew, alike on all ranks. Batches are loaded in the training process unless workers
    are asked for; workers never start by fork, because a forked child would keep the parent's old pages
    alive: up to 18 host bytes a parameter (DeepSpeed issue 7693).

    Args:
        dataset: Map-style, or iterable (which splits itself over ranks).
        batch_size: Samples a batch on this rank.
        data_parallel_rank: Which part is this rank's.
        data_parallel_world_size: How many parts there are.
        collate_fn: Makes a batch of samples; torch's by default.
        drop_last: Leave out what does not fill a batch, or does not divide over the ranks. Otherwise the last
            batch is short, and samples are repeated to divide.
        options: More of torch's DataLoader. ``sampler`` replaces the distributed one; ``shuffle`` False makes
            that keep the order; ``num_workers`` start with "forkserver" at the first batch unless
            ``multiprocessing_context`` says otherwise.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        data_parallel_rank: int = 0,
        data_parallel_world_size: int = 1,
        collate_fn: Callable[..., Any] | None = None,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        shuffle = options.pop("shuffle", True)
        if "sampler" not in options and not isinstance(dataset, IterableDataset):
            options["sampler"] = DistributedSampler(
                dataset, data_parallel_world_size, data_parallel_rank, shuffle=shuffle, drop_last=drop_last
            )
        if options.get("num_workers", 0) > 0:
            options = {"multiprocessing_context": "forkserver", "persistent_workers": True, **options}
        self.data_sampler = options.get("sampler")
        self._epoch = 0
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=batch_size, collate_fn=collate_fn, drop_last=drop_last, **options
        )
        self._batches: Iterator[Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass the given one, so that a resumed run shuffles as it would have."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches of a pass."""
        return len(self._loader)

    def __iter__(self) -> Iterator[torch.Tensor | Any]:
        """Start a pass."""
        set_epoch = getattr(self.data_sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._epoch)
        self._epoch += 1
        self._batches = iter(self._loader)
        return self._batches

    def __next__(self) -> Any:
        """Return the next batch of the pass, starting one if need be.

        Raises:
            StopIteration: The pass is over; the next call starts another.
        """
        if self._batches is None:
            iter(self)
        assert self._batches is not None
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None
            raise
