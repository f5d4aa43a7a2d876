"""Publishing: every element of every parameter is fresh on every rank, and padding reaches none."""

import itertools

import pytest
import torch

from deepspeed.runtime.zero import collectives
from deepspeed.runtime.zero.collectives import Comm
from deepspeed.runtime.zero.layout import plan_groups
from deepspeed.runtime.zero.publisher import ParamPublisher, params_dtype, publish_all

GROUPS = {
    "odd": [[5, 3, 7]],
    "one scalar": [[1]],
    "two groups": [[6, 1], [5, 4]],
    "a group without parameters": [[], [3]],
}


def _numbered(groups):
    counter = itertools.count()
    return [[(next(counter), numel) for numel in group] for group in groups]


def _value(group, position):
    """What the element at a position of a group's flat buffer is to become; exact in bf16."""
    return 64.0 * (group + 1) + position


class OneOfMany:
    """Rank `rank` of a world whose other ranks publish in step: an all-gather is answered for them."""

    def __init__(self, monkeypatch, groups, rank, world, chunk_numel, dtype=torch.bfloat16):
        self.layouts = plan_groups(_numbered(groups), world)
        self.params = {
            slot.index: torch.nn.Parameter(torch.full((slot.numel,), torch.nan, dtype=dtype))
            for layout in self.layouts
            for slot in layout.slots
        }
        self.rank = rank
        self.chunks = []  # (group, start, end) in the order of opening
        self.waiting = 0
        self.most_waiting = 0
        monkeypatch.setattr(collectives, "launch_all_gather", self._all_gather)
        self.publisher = ParamPublisher(self.layouts, self.params, Comm(None, rank, world, True), chunk_numel)
        open_chunk = self.publisher.open_chunk

        def recording(group, start, end):
            self.chunks.append((group, start, end))
            return open_chunk(group, start, end)

        monkeypatch.setattr(self.publisher, "open_chunk", recording)

    def _all_gather(self, gathered, own, comm):
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        group, start, end = next(
            c for c in self.chunks if c[2] - c[1] == own.numel() and c not in self.gathered
        )
        self.gathered.append((group, start, end))
        rows = gathered.view(comm.world, -1)
        for rank in range(comm.world):
            low, high = self.layouts[group].shard_bounds(rank)
            for offset in range(end - start):
                position = low + start + offset
                rows[rank, offset] = _value(group, position) if position < high else torch.nan
        rows[comm.rank].copy_(own)

        def wait():
            self.waiting -= 1

        return wait

    def write(self, group, target):
        base = self.layouts[group].shard_bounds(self.rank if self.layouts[group].shards > 1 else 0)[0]
        values = [_value(group, base + position) for position in range(target.start, target.end)]
        target.out.copy_(torch.tensor(values))

    def publish(self, write=None):
        self.gathered = []
        publish_all(self.publisher, len(self.layouts), write or self.write)
        for index, layout in enumerate(self.layouts):
            for slot in layout.slots:
                expected = [_value(index, position) for position in range(slot.start, slot.end)]
                assert self.params[slot.index].tolist() == expected, (index, slot)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("chunk_numel", [1, 2, 3, 1000])
def test_every_element_arrives_and_no_padding_does(monkeypatch, groups, world, chunk_numel):
    for rank in range(world):
        one = OneOfMany(monkeypatch, groups, rank, world, chunk_numel)
        one.publish()
        one.publish()  # and again: nothing of the first time is left over


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_every_rank_opens_the_same_chunks_also_where_it_owns_nothing(monkeypatch, groups):
    sequences = []
    for rank in range(3):
        one = OneOfMany(monkeypatch, groups, rank, 3, 2)
        one.publish()
        sequences.append((one.chunks, one.gathered))
    assert sequences[1] == sequences[0] and sequences[2] == sequences[0]


def test_one_gather_is_in_flight_while_the_next_chunk_is_written(monkeypatch):
    one = OneOfMany(monkeypatch, [[40]], 0, 2, 5)
    one.publish()
    assert one.most_waiting == 2, "the one in flight, and the one just launched before it is waited for"
    assert one.waiting == 0


def test_the_next_chunk_is_queued_before_one_is_waited_for(monkeypatch):
    one = OneOfMany(monkeypatch, [[40]], 1, 2, 5)
    events = []

    def queue(group, target):
        events.append(("queue", target.start))

        def wait():
            events.append(("wait", target.start))
            one.write(group, target)  # as late as it may be written

        return wait

    one.publish(queue)
    expected = [("queue", 0), ("queue", 5), ("wait", 0), ("queue", 10), ("wait", 5), ("queue", 15)]
    assert events == [*expected, ("wait", 10), ("wait", 15)]


def test_an_error_while_computing_reaches_the_caller(monkeypatch):
    one = OneOfMany(monkeypatch, [[40]], 0, 2, 5)

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        one.publish(lambda group, target: fail)


def test_parameters_of_several_dtypes_are_published_through_fp32():
    (layout,) = plan_groups(_numbered([[2, 3]]), 2)
    params = {0: torch.nn.Parameter(torch.zeros(2)), 1: torch.nn.Parameter(torch.zeros(3).bfloat16())}
    assert params_dtype(layout, params) == torch.float32
    params[0] = torch.nn.Parameter(torch.zeros(2).bfloat16())
    assert params_dtype(layout, params) == torch.bfloat16
