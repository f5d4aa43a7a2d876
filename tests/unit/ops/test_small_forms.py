"""Smaller forms of master and moments: what is lossless is so for every bit, the rest within bounds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from op_builder import CPUAdamBuilder

from .reference import Settings

ROOT = Path(__file__).parents[3]
NUMEL = 70_001  # several tasks of the kernel; no multiple of anything


@pytest.fixture(scope="module")
def op():
    return CPUAdamBuilder().load()


def split(op, master):
    rest = torch.empty(master.numel(), dtype=torch.int16)
    weight = torch.empty(master.numel(), dtype=torch.bfloat16)
    ties = torch.zeros(-(-master.numel() // 16), dtype=torch.int16)
    op.split_master(master, rest, weight, ties)
    return rest, weight, ties


def joined(op, rest, weight, ties):
    master = torch.empty(rest.numel())
    op.join_master(rest, weight, ties, master)
    return master


def test_every_lower_half_under_many_upper_halves_comes_back(op):
    lower = torch.arange(1 << 16, dtype=torch.int32)
    for upper in (0x0000, 0x0001, 0x3F80, 0x3F81, 0x7F7F, 0x8000, 0xBF80, 0xFF7F, 0x7F7E, 0x0080):
        bits = lower | (upper - (1 << 16) if upper >= 0x8000 else upper) << 16
        master = bits.view(torch.float32)
        rest, weight, ties = split(op, master)
        assert torch.equal(weight, master.bfloat16()), "the weight is the one that rounding would give"
        assert torch.equal(joined(op, rest, weight, ties).view(torch.int32), bits), hex(upper)


def test_infinity_stays_and_nan_stays_nan(op):
    master = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    back = joined(op, *split(op, master))
    assert torch.equal(back[[0, 1, 3]], master[[0, 1, 3]]) and back[2].isnan()


def test_residual_masters_train_with_the_same_bits(op):
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(NUMEL, generator=generator)
    master.view(torch.int32)[::5].bitwise_and_(~0xFFFF).bitwise_or_(0x8000)  # many ties
    rest, weight, ties = split(op, master)
    moments, others = [[torch.zeros(NUMEL) for _ in range(2)] for _ in range(2)]
    out = master.bfloat16()
    for step in range(1, 51):
        grad = torch.randn(NUMEL, generator=generator).bfloat16()
        grad[step::3] = 0  # some masters rest for a while
        settings = Settings(step=step, num_threads=2).args()
        op.adam_step(master, grad, *moments, out, *settings)
        op.adam_step(rest, grad, *others, weight, *settings, ties=ties)
    assert torch.equal(weight, out)
    assert torch.equal(joined(op, rest, weight, ties), master)
    assert all(torch.equal(a, b) for a, b in zip(moments, others, strict=True))


def quantized(op, values, is_signed):
    codes = torch.empty(values.numel(), dtype=torch.uint8)
    scale = torch.empty(-(-values.numel() // 256))
    op.encode_moment(values, is_signed, codes, scale)
    return codes, scale


def widened(op, codes, scale, is_signed):
    values = torch.empty(codes.numel())
    op.decode_moment(codes, scale, is_signed, values)
    return values


def spread_values(is_signed):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(NUMEL, generator=generator) * torch.exp(4 * torch.randn(NUMEL, generator=generator))
    values[512:1024] = 0
    return values if is_signed else values.abs()


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_quantised_block_is_near_and_keeps_zero_sign_and_maximum(op, is_signed):
    values = spread_values(is_signed)
    codes, scale = quantized(op, values, is_signed)
    back = widened(op, codes, scale, is_signed)
    blocks = range(0, NUMEL, 256)
    assert torch.equal(scale, torch.stack([values[i : i + 256].abs().max() for i in blocks]))
    assert (back.sign() * values.sign() >= 0).all() and (back[values == 0] == 0).all()
    # Parts of a decade are as wide as 0.9 / 64 of it, or half of that without a sign; at rest their middle.
    share = (values.abs().view(-1) / scale.repeat_interleave(256)[:NUMEL]).nan_to_num()
    upper = share >= 0.1
    bound = 0.9 / (64 if is_signed else 128)
    assert ((back - values).abs() <= bound * scale.repeat_interleave(256)[:NUMEL] * 1.001)[upper].all()
    if not is_signed:
        assert (back[values > 0] > 0).all(), "a second moment never vanishes under a first one"


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_and_scales_survive_a_trip_through_fp32(op, is_signed):
    codes, scale = quantized(op, spread_values(is_signed), is_signed)
    again = quantized(op, widened(op, codes, scale, is_signed), is_signed)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scale)
    assert codes.unique().numel() >= 240, "the values met nearly every code"


def stochastic_step(op, exp_avg, grad, step=1, key=7, first=0, threads=2):
    """One step that only decays and adds to the first moment."""
    numel = grad.numel()
    master, exp_avg_sq = torch.zeros(numel), torch.zeros(numel, dtype=torch.bfloat16)
    settings = Settings(step=step, num_threads=threads, beta1=0.999, grad_scale=1.0).args()
    op.adam_step(master, grad, exp_avg, exp_avg_sq, None, *settings, noise_key=key, first=first)
    return exp_avg_sq


def test_rounding_by_chance_is_right_on_average(op):
    """A moment at rest under a gradient a little larger: each step adds less than half of what bf16 can."""
    exp_avg, grad = torch.ones(NUMEL, dtype=torch.bfloat16), torch.full((NUMEL,), 1.2)
    expected = 1.0
    for step in range(1, 101):
        stochastic_step(op, exp_avg, grad, step, key=step)
        expected += (1.2 - expected) * 0.001
    # Standard deviation of the mean: at most half a step of bf16, times the root of 100 steps, over all.
    bound = 5 * 2**-8 * 10 / NUMEL**0.5
    assert abs(exp_avg.float().mean().item() - expected) < bound
    assert exp_avg.unique().numel() > 3, "rounding to nearest would have left them all at 1"


def test_noise_belongs_to_the_element_not_to_tile_or_thread(op):
    grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(2))
    whole = torch.zeros(NUMEL, dtype=torch.bfloat16)
    whole_sq = stochastic_step(op, whole, grad, first=1000)
    tiled = torch.zeros(NUMEL, dtype=torch.bfloat16)
    starts = range(0, NUMEL, 17 * 256)
    pieces = [
        stochastic_step(op, tiled[at : at + 17 * 256], grad[at : at + 17 * 256], first=1000 + at, threads=1)
        for at in starts
    ]
    assert torch.equal(tiled, whole) and torch.equal(torch.cat(pieces), whole_sq)
    other = torch.zeros(NUMEL, dtype=torch.bfloat16)
    stochastic_step(op, other, grad, key=8, first=1000)
    assert not torch.equal(other, whole), "another key is another noise"


@pytest.mark.parametrize("level", ["scalar", "avx2"])
def test_vector_levels_compute_the_same_bits(op, level, tmp_path):
    if level == "avx2" and op.simd_level() not in ("avx2", "avx512"):
        pytest.skip("this processor has no AVX2")
    for name, environment in (("own", {}), (level, {"DS_SIMD_LEVEL": level})):
        script = [sys.executable, "-m", "tests.unit.ops.forms_probe", str(tmp_path / name)]
        subprocess.run(script, check=True, cwd=ROOT, env={**os.environ, **environment})
    own, other = (torch.load(tmp_path / name) for name in ("own", level))
    assert own.keys() == other.keys()
    for name in own:
        assert torch.equal(own[name], other[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ties": torch.zeros(1, dtype=torch.int16)}, "ties: expected 16 contiguous elements"),
        ({"out": None}, "out: expected the weights, got none"),
        ({"exp_avg_scale": torch.zeros(1)}, "exp_avg: expected 256 contiguous elements of Byte"),
    ],
)
def test_arguments_that_do_not_fit_are_named(op, change, message):
    rest, weight, ties = split(op, torch.ones(256))
    moments = [torch.zeros(256) for _ in range(2)]
    out = change.pop("out", weight)
    with pytest.raises(ValueError, match=message):
        op.adam_step(
            rest, torch.zeros(256), *moments, out, *Settings(step=1).args(), **{"ties": ties, **change}
        )
