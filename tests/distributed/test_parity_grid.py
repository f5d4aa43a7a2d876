"""Stages, offload, worlds, accumulation, buckets and overlap choose where arithmetic happens, not its result.

The gradients of `ExactModel` are exact whatever the order of sums. Without offload these tests use torch's
plain AdamW, whose operations the host kernel repeats one by one: then every run must agree in every bit.
FusedAdam, the default without offload, is torch's fused kernel: it rounds differently in whole vectors and in
the rest behind them, so a shard's bounds move single bits, and a bound takes the place of equality.
"""

import functools
import itertools

import pytest
import torch

from tests.distributed.harness import run_distributed
from tests.distributed.training import (
    ExactModel,
    Setup,
    assert_close,
    assert_same_bits,
    start,
    state_of,
    train_exact,
)

PLACES = [(0, False), (1, False), (2, False), (1, True), (2, True)]
BUCKETS = (1, 7, 1000, 1 << 24)
TORCH_ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
# Two implementations of Adam, each rounding a handful of times a step: 10 steps of at most 4 units of 2^-23.
TWO_KERNELS = 10 * 4 * 2.0**-23


def _setup(place, *settings, **changes):
    stage, offload = place
    setup = Setup(stage, offload, *settings, **changes)
    return setup if offload else setup.but(optimizer=TORCH_ADAMW)


def train_each(setups):
    results = []
    for setup in setups:
        engine = start(ExactModel(), setup)
        train_exact(engine)
        results.append((state_of(engine), engine.get_global_grad_norm()))
        engine.destroy()
    return results


def _run(world, setups):
    """Every setup on a world; all ranks must see the same. Returns one (state, norm) a setup."""
    per_rank = run_distributed(world, train_each, setups)
    for results in per_rank[1:]:
        for setup, (state, norm), (state_0, norm_0) in zip(setups, results, per_rank[0], strict=True):
            assert_same_bits(state, state_0, setup)
            assert norm == norm_0, setup
    return per_rank[0]


@functools.cache
def _plainest(**changes):
    """State and norm of one rank at stage 1."""
    (result,) = _run(1, [_setup((1, False), **changes)])
    return result


def _assert_all_equal_the_plainest(world, setups, **changes):
    expected, expected_norm = _plainest(**changes)
    for setup, (state, norm) in zip(setups, _run(world, setups), strict=True):
        assert_same_bits(state, expected, (world, setup))
        assert norm == expected_norm, (world, setup)
    return expected, expected_norm


@pytest.mark.parametrize("world", [1, 2, 3])
def test_fp32_bits_do_not_depend_on_stage_offload_world_or_accumulation(world):
    _assert_all_equal_the_plainest(world, [_setup(*point, 7) for point in itertools.product(PLACES, (1, 4))])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_fp32_bits_do_not_depend_on_bucket_size_or_overlap(world):
    grid = itertools.product([((2, True), 4), ((1, False), 1)], BUCKETS, (True, False))
    _assert_all_equal_the_plainest(
        world,
        [_setup(place, accumulation, bucket, overlap) for (place, accumulation), bucket, overlap in grid],
    )


@pytest.mark.parametrize("world", [1, 2, 3])
def test_fp32_bits_do_not_depend_on_the_tiles_of_the_step(world):
    grid = itertools.product(PLACES, (1, 7, 50))
    _assert_all_equal_the_plainest(
        world, [_setup(place, zero={"allgather_bucket_size": numel}) for place, numel in grid]
    )


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bit_results_do_not_depend_on_stage_offload_world_or_accumulation(dtype, world):
    setups = [_setup(*point, 7, dtype=dtype) for point in itertools.product(PLACES, (1, 4))]
    expected, _ = _assert_all_equal_the_plainest(world, setups, dtype=dtype)
    for name in ExactModel().state_dict():
        low, master = expected[f"{name}.param"], expected[f"{name}.master"]
        assert master.dtype == torch.float32
        assert torch.equal(low, master.to(low.dtype)), "a weight is its master, rounded once"
        assert not torch.equal(low.float(), master), "a master keeps what the weight cannot"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_clipped_results_and_norms_do_not_depend_on_stage_offload_world_or_accumulation(world):
    changes = {"clipping": 0.5, "dtype": "fp16"}
    setups = [
        _setup(place, accumulation, **changes)
        for place, accumulation in zip(PLACES, (1, 4, 1, 4, 4), strict=True)
    ]
    _, norm = _assert_all_equal_the_plainest(world, setups, **changes)
    assert norm > 0.5


@pytest.mark.parametrize("world", [1, 2, 3])
def test_torchs_fused_kernel_agrees_within_its_own_rounding(world):
    expected, _ = _plainest()
    setups = [Setup(stage, accumulation=accumulation) for stage in (0, 1, 2) for accumulation in (1, 4)]
    for setup, (state, _) in zip(setups, _run(world, setups), strict=True):
        assert_close(state, expected, TWO_KERNELS, (world, setup))


def _train_mixed(setups):
    """Half of the parameters in bf16, half in fp32, in one group, as a model that casts itself."""
    results = []
    for setup in setups:
        model = ExactModel()
        for name in ("weight", "scalar", "wide"):
            getattr(model, name).data = getattr(model, name).data.bfloat16()
        engine = start(model, setup)
        train_exact(engine)
        assert model.weight.dtype == torch.bfloat16 and model.cube.dtype == torch.float32
        results.append(state_of(engine))
        engine.destroy()
    return results


def test_a_group_of_several_dtypes_trains_the_same_everywhere():
    setups = [_setup(place, accumulation, 7) for place, accumulation in itertools.product(PLACES, (1, 4))]
    expected = run_distributed(1, _train_mixed, setups[:1])[0][0]
    for world in (1, 2, 3):
        for results in run_distributed(world, _train_mixed, setups):
            for setup, state in zip(setups, results, strict=True):
                assert_same_bits(state, expected, (world, setup))
