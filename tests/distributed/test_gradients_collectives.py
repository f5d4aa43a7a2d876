"""Which collectives run, how often, in which order, and in which dtype."""

import pytest
import torch

from deepspeed.runtime.zero import collectives
from tests.distributed.harness import run_distributed
from tests.distributed.training import (
    ExactModel,
    Setup,
    exact_rows,
    rank_and_world,
    start,
    state_of,
    total_numel,
)

SGD = {"type": "SGD", "params": {"lr": 1.0}}
PLACES = [(0, False), (1, False), (2, False), (1, True), (2, True)]
TRACED = (
    "launch_reduce_mean",
    "launch_all_reduce_mean",
    "launch_all_gather",
    "all_reduce_sum",
    "broadcast",
)


class _Trace:
    """Records every collective that the ZeRO optimizer starts."""

    def __init__(self):
        self.calls = []  # (function, numel, dtype)
        for name in TRACED:
            setattr(collectives, name, self._recording(name, getattr(collectives, name)))

    def _recording(self, name, function):
        def call(subject, *args, **kwargs):
            if isinstance(subject, torch.Tensor):
                self.calls.append((name, subject.numel(), subject.dtype))
            else:
                self.calls.append((name, len(subject), None))
            return function(subject, *args, **kwargs)

        return call

    def take(self):
        """The calls since the last `take`, by function: how many."""
        calls, self.calls = self.calls, []
        return {
            name: sum(call[0] == name for call in calls)
            for name in TRACED
            if any(c[0] == name for c in calls)
        }


# What each one does ----------------------------------------------------------------------------------------


def _run_each_collective():
    rank, world = rank_and_world()
    comm = collectives.Comm.of(torch.distributed.group.WORLD)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for counts in ([3] * world, [0] * (world - 1) + [5], [4] + [0] * (world - 1), list(range(world))):
            bounds = [sum(counts[:owner]) for owner in range(world + 1)]
            flat = torch.arange(bounds[-1], dtype=dtype) + rank
            collectives.launch_reduce_mean(flat, bounds, comm)()
            low, high = bounds[rank], bounds[rank + 1]
            assert torch.equal(flat[low:high], torch.arange(low, high, dtype=dtype) + (world - 1) / 2)
        for numel in (0, 1, 2, 7):
            flat = torch.arange(numel, dtype=dtype) + rank
            collectives.launch_all_reduce_mean(flat, comm)()
            assert torch.equal(flat, torch.arange(numel, dtype=dtype) + (world - 1) / 2)
            own = torch.full((numel,), float(rank), dtype=dtype)
            gathered = torch.empty(world * numel, dtype=dtype)
            collectives.launch_all_gather(gathered, own, comm)()
            assert gathered.tolist() == [float(owner) for owner in range(world) for _ in range(numel)]
            for owner in range(world):
                value = torch.full((numel,), float(rank), dtype=dtype)
                collectives.broadcast(value, owner, comm)
                assert value.tolist() == [float(owner)] * numel
    # Two in flight at once.
    flats = [torch.full((6,), float(rank + shift)) for shift in (0, 10)]
    waits = [collectives.launch_all_reduce_mean(flat, comm) for flat in flats]
    for wait in waits:
        wait()
    assert [flat[0].item() for flat in flats] == [(world - 1) / 2, 10 + (world - 1) / 2]
    tiny = 2.0**-50  # a double's, lost in fp32
    assert collectives.all_reduce_sum([1 + tiny, rank], comm, torch.device("cpu")) == [
        world * (1 + tiny),
        world * (world - 1) / 2,
    ]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_collective_does_what_it_says_for_every_dtype_and_for_empty_parts(world):
    run_distributed(world, _run_each_collective)


# How often -------------------------------------------------------------------------------------------------


def _count_collectives(stage, offload):
    trace = _Trace()
    # Each of the six parameters is its own bucket; one chunk holds the shard.
    engine = start(ExactModel(), Setup(stage, offload, accumulation=4, bucket_numel=1, optimizer=SGD))
    trace.take()
    counts = []
    for _ in range(2):
        for part in range(4):
            engine.backward(engine(exact_rows(part, total_numel(engine.module))))
            backward = trace.take()
            engine.step()
            counts.append((backward, trace.take()))
    engine.destroy()
    return counts


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_stage_2_reduces_each_micro_batch_and_stages_0_and_1_once_a_step(place, world):
    buckets = 6
    stage = place[0]
    whole = stage == 0 or world == 1
    reduction = {"launch_all_reduce_mean" if whole else "launch_reduce_mean": buckets}
    # One rank has nothing to send: taking each pass costs nothing and saves a second copy of the gradients.
    every_pass = stage == 2 or world == 1
    decision = {"all_reduce_sum": 1}
    publishing = {} if whole else {"launch_all_gather": 1}
    for counts in run_distributed(world, _count_collectives, *place):
        for micro, (backward, step) in enumerate(counts):
            boundary = micro % 4 == 3
            if stage == 0:
                backward.pop("launch_all_gather", None)  # the second half of an all-reduce on gloo
            assert backward == (reduction if every_pass or boundary else {}), (micro, "backward")
            assert step == ({**decision, **publishing} if boundary else {}), (micro, "step")


# In which order --------------------------------------------------------------------------------------------


class _TwoWays(torch.nn.Module):
    """Each rank takes another way through the layers, and leaves some of them out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(6))

    def forward(self, hidden, order):
        for index in order:
            hidden = self.layers[index](hidden)
        return hidden.square().sum()


ORDERS = [(0, 1, 2, 3, 4, 5), (5, 3, 1), (2, 2, 0, 4)]


def _sequence_of_collectives(stage, overlap):
    rank, world = rank_and_world()
    trace = _Trace()
    engine = start(_TwoWays(), Setup(stage, True, 2, bucket_numel=20, overlap=overlap, optimizer=SGD))
    for step in range(3):
        for _ in range(2):
            order = ORDERS[(rank + step) % len(ORDERS)]
            engine.backward(engine(torch.ones(2, 4), order))
            engine.step()
    engine.destroy()
    return trace.calls


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", [1, 2])
def test_every_rank_runs_the_same_collectives_in_the_same_order_whatever_its_branch(stage, overlap, world):
    sequences = run_distributed(world, _sequence_of_collectives, stage, overlap, timeout_s=60)
    assert all(sequence == sequences[0] for sequence in sequences)
    assert len(sequences[0]) > 3 * 6


# In which dtype --------------------------------------------------------------------------------------------


class _Row(torch.nn.Module):
    """The gradient is the row."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, row):
        return (self.weight * row.to(self.weight.dtype)).sum()


def _reduced_rows(setups, rows):
    rank, _ = rank_and_world()
    trace = _Trace()
    results = []
    for setup in setups:
        engine = start(_Row(), setup)
        trace.calls.clear()
        engine.backward(engine(torch.tensor(rows[rank])))
        dtypes = {dtype for name, _, dtype in trace.calls if name.endswith("reduce_mean")}
        engine.step()
        results.append((-state_of(engine)["weight.master"], dtypes))
        engine.destroy()
    return results


def _check_reduced(rows, model_dtype, wire, expected, wire_dtype):
    extra = {"communication_data_type": wire} if wire else {}
    setups = [Setup(*place, dtype=model_dtype, optimizer=SGD, extra=extra) for place in PLACES]
    for results in run_distributed(len(rows), _reduced_rows, setups, rows):
        for setup, (grad, dtypes) in zip(setups, results, strict=True):
            assert dtypes == {wire_dtype}, setup
            assert torch.equal(grad, torch.tensor(expected)), (setup, grad)


def test_gradients_travel_in_communication_data_type_at_every_stage():
    fine = 2.0**-12  # lost in bf16 beside 1, kept in fp32 and, beside 1/4, in fp16
    rows = [[1 + fine, 0.25 + fine, 3.0], [1.0, 0.25 + fine, 1.0]]
    _check_reduced(rows, "fp32", None, [1 + fine / 2, 0.25 + fine, 2.0], torch.float32)
    _check_reduced(rows, "fp32", "bf16", [1.0, 0.25, 2.0], torch.bfloat16)
    _check_reduced(rows, "fp32", "fp16", [1.0, 0.25 + fine, 2.0], torch.float16)


def test_a_wider_communication_data_type_keeps_what_the_mean_of_16_bit_gradients_gains():
    rows = [[1.0, 2.0, 3.0], [1 + 2.0**-7, 2.0, 1.0]]
    mean = 1 + 2.0**-8  # half a bf16 unit above 1
    _check_reduced(rows, "bf16", "fp32", [mean, 2.0, 2.0], torch.float32)
    _check_reduced(rows, "bf16", None, [1.0, 2.0, 2.0], torch.bfloat16)


def test_16_bit_gradients_are_summed_wider_than_they_travel_on_gloo():
    # A sum in bf16 would stop at 256, and one in fp16 at 2048.
    _check_reduced([[256.0] * 3, [1.0] * 3, [1.0] * 3], "bf16", None, [86.0] * 3, torch.bfloat16)
    _check_reduced([[2048.0] * 3, [1.0] * 3, [1.0] * 3], "fp16", None, [683.5] * 3, torch.float16)


def _means_beyond_the_sum():
    found = []
    for stage, offload in PLACES:
        keys = {"fp16": {"enabled": True, "loss_scale": 1}, "prescale_gradients": True}
        engine = start(ExactModel({"weight": (6,)}), Setup(stage, offload, optimizer=SGD, extra=keys))
        engine.backward((engine.module.weight * 40000.0).sum())
        engine.step()
        found.append((engine.was_step_applied(), engine.get_global_grad_norm()))
        engine.destroy()
    return found


def test_a_mean_of_fp16_gradients_does_not_overflow_though_their_sum_would():
    for found in run_distributed(2, _means_beyond_the_sum):
        assert found == [(True, pytest.approx(40000.0 * 6**0.5, rel=1e-3))] * len(PLACES)
