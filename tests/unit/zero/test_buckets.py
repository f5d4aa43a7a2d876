"""Buckets and their rounds, on one rank of an imaginary world: every collective is recorded, none is run."""

import weakref

import pytest
import torch

from deepspeed.runtime.zero import collectives
from deepspeed.runtime.zero.buckets import BucketPool, GradReducer
from deepspeed.runtime.zero.collectives import Comm
from deepspeed.runtime.zero.host_buffer import HostBuffer, Ledger
from deepspeed.runtime.zero.layout import plan_buckets, plan_groups

SHAPES = [(3, 2), (5,), (4,), (1,)]
NUMELS = [6, 5, 4, 1]
FULL = sum(NUMELS)


class World:
    """A reducer on `rank` of `world` imaginary ranks that all contribute what this one does."""

    def __init__(self, monkeypatch, world=2, rank=0, bucket_numel=1, overlap=True, dtype=torch.float32):
        self.log = []  # ("launch", values) and ("wait", number of elements)
        monkeypatch.setattr(collectives, "launch_reduce_mean", self._launch)
        monkeypatch.setattr(
            collectives, "launch_all_reduce_mean", lambda flat, comm: self._launch(flat, None, comm)
        )
        groups = plan_groups([list(enumerate(NUMELS))], world)
        self.layout = groups[0]
        self.params = {
            index: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for index, shape in enumerate(SHAPES)
        }
        self.arrived = torch.full((FULL,), torch.nan)  # what the sink got, by position in the group
        self.rank = rank
        self.ledger = Ledger()
        plans = plan_buckets(groups, bucket_numel)
        largest = max(plan.numel for plan in plans)
        pool = BucketPool(
            dtype, torch.device("cpu"), lambda: HostBuffer("bucket", largest, dtype, self.ledger)
        )
        comm = Comm(None, rank, world, True)
        self.reducer = GradReducer(plans, self.params, comm, self._sink, pool, overlap)
        self.reducer.armed = True

    def _launch(self, flat, owner_bounds, comm):
        self.log.append(("launch", flat.tolist()))
        return lambda: self.log.append(("wait", flat.numel()))

    def _sink(self, items, flat):
        base = items[0].bucket_start
        shard_start = self.layout.shard_bounds(self.rank)[0]
        for item in items:
            assert item.owner == self.rank
            first = shard_start + item.shard_start
            before = self.arrived[first : first + item.numel]
            piece = flat[item.bucket_start - base :][: item.numel].float()
            self.arrived[first : first + item.numel] = torch.nan_to_num(before) + piece

    def arrive(self, index, value):
        """A gradient of `value` comes out of autograd."""
        param = self.params[index]
        (param * value).sum().backward()

    @property
    def launches(self):
        return [values for kind, values in self.log if kind == "launch"]

    def of(self, index):
        """What the sink got for a parameter, `[its owned elements]`."""
        slot = self.layout.slots[index]
        low, high = self.layout.shard_bounds(self.rank)
        return self.arrived[max(slot.start, low) : min(slot.end, high)].tolist()


ORDERS = [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_are_launched_in_plan_order_whatever_order_gradients_arrive_in(monkeypatch, order, overlap):
    world = World(monkeypatch, overlap=overlap)
    for index in order:
        world.arrive(index, 1.0 + index)
    world.reducer.flush()
    assert world.launches == [[1.0 + index] * NUMELS[index] for index in (3, 2, 1, 0)]


def test_a_complete_bucket_waits_for_those_before_it_and_no_longer(monkeypatch):
    world = World(monkeypatch)
    world.arrive(2, 1.0)
    assert world.launches == []
    world.arrive(3, 1.0)
    assert len(world.launches) == 2, "during the backward pass, without a flush"
    world.arrive(1, 1.0)
    assert len(world.launches) == 3


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("overlap", "in_flight"), [(True, 1), (False, 0)])
def test_no_more_buckets_than_allowed_have_a_buffer_whatever_order_gradients_arrive_in(
    monkeypatch, overlap, in_flight, order
):
    world = World(monkeypatch, overlap=overlap)
    for index in order:
        world.arrive(index, 1.0)
        kinds = [kind for kind, _ in world.log]
        assert kinds.count("launch") - kinds.count("wait") <= in_flight
    world.reducer.flush()
    # One that fills, beside those in flight.
    assert len(list(world.ledger)) == 1 + in_flight


def test_a_gradient_leaves_its_parameter_at_once_if_its_bucket_is_next_else_at_its_turn(monkeypatch):
    world = World(monkeypatch)
    world.arrive(0, 1.0)  # in the last bucket
    world.arrive(3, 1.0)  # in the first
    assert world.params[0].grad is not None and world.params[3].grad is None
    assert world.reducer.pending_count() == 2
    world.arrive(1, 1.0)
    world.arrive(2, 1.0)
    assert world.params[0].grad is None, "without a flush"


def test_gradients_that_arrive_before_their_bucket_is_launched_add_up(monkeypatch):
    world = World(monkeypatch, bucket_numel=100)
    for value in (1.0, 2.0, 4.0):
        world.arrive(0, value)
    world.reducer.flush()
    assert world.of(0) == [7.0] * 6


def test_a_gradient_after_its_buckets_launch_goes_into_the_next_round(monkeypatch):
    world = World(monkeypatch)
    for index in (3, 2, 1, 0):
        world.arrive(index, 1.0)
    world.arrive(0, 2.0)
    assert world.params[0].grad.flatten().tolist() == [2.0] * 6
    assert world.reducer.pending_count() > 0
    world.reducer.flush()
    assert world.of(0) == [1.0] * 6
    assert world.reducer.pending_count() == 1
    world.reducer.flush()
    assert world.of(0) == [3.0] * 6, "nothing is lost, nothing is counted twice"
    assert world.reducer.pending_count() == 0
    assert world.reducer.rounds == 2


def test_missing_gradients_contribute_zeros_also_in_a_buffer_that_was_used_before(monkeypatch):
    world = World(monkeypatch, bucket_numel=100)
    for index in range(4):
        world.arrive(index, 9.0)
    world.reducer.flush()
    world.arrive(1, 1.0)
    world.reducer.flush()
    # The bucket holds what rank 0 owns first, then what rank 1 owns, each in reverse model order.
    assert sorted(world.launches[1]) == [0.0] * 11 + [1.0] * 5
    assert world.reducer.seen == {0, 1, 2, 3}


def test_without_arming_gradients_stay_and_the_next_armed_pass_takes_their_sum(monkeypatch):
    world = World(monkeypatch)
    world.reducer.armed = False
    for index in range(4):
        world.arrive(index, 1.0)
    assert world.launches == [] and world.params[3].grad is not None
    world.reducer.armed = True
    for index in (3, 2, 1):
        world.arrive(index, 1.0)
    world.reducer.flush()  # parameter 0 took no part in the armed pass
    assert [world.of(index)[:1] for index in (0, 1)] == [[1.0], [2.0]]
    assert world.launches[0] == [2.0]


@pytest.mark.parametrize("bucket_numel", [1, 7, 100])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_is_handed_its_shard_and_nothing_else(monkeypatch, world_size, bucket_numel):
    values = torch.cat([torch.arange(numel) + 10.0 * index for index, numel in enumerate(NUMELS)])
    seen = torch.full((FULL,), torch.nan)
    for rank in range(world_size):
        world = World(monkeypatch, world_size, rank, bucket_numel)
        for index, param in world.params.items():
            param.grad = (torch.arange(NUMELS[index]) + 10.0 * index).view(SHAPES[index])
        world.reducer.flush()
        low, high = world.layout.shard_bounds(rank)
        assert world.arrived.isnan().sum() == FULL - (high - low)
        seen[low:high] = world.arrived[low:high]
    assert torch.equal(seen, values)


def test_gradients_travel_in_the_pools_dtype(monkeypatch):
    world = World(monkeypatch, dtype=torch.bfloat16)
    world.arrive(3, 1 + 2.0**-7)
    assert world.launches == [[1 + 2.0**-7]]


def test_a_sparse_gradient_is_taken_as_a_dense_one(monkeypatch):
    world = World(monkeypatch)
    torch.nn.functional.embedding(torch.tensor([1, 1]), world.params[0], sparse=True).sum().backward()
    world.reducer.flush()
    assert world.of(0) == [0.0, 0.0, 2.0, 2.0, 0.0, 0.0]


def test_after_close_parameters_are_ordinary_and_the_memory_is_back(monkeypatch):
    world = World(monkeypatch)
    world.arrive(3, 1.0)
    world.reducer.close()
    assert list(world.ledger) == []
    world.arrive(2, 1.0)
    assert world.params[2].grad.tolist() == [1.0] * 4


def test_parameters_do_not_keep_a_reducer_alive():
    params = {0: torch.nn.Parameter(torch.zeros(4))}
    plans = plan_buckets(plan_groups([[(0, 4)]], 1), 1)
    pool = BucketPool(torch.float32, torch.device("cpu"), lambda: None)
    reducer = GradReducer(plans, params, Comm(None, 0, 1, True), lambda items, flat: None, pool, True)
    reducer.armed = True
    gone = weakref.ref(reducer)
    del reducer
    assert gone() is None
    (params[0] * 2).sum().backward()
    assert params[0].grad.tolist() == [2.0] * 4, "and their hooks do nothing"
