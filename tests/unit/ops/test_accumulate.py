"""The accumulating kernel: what it stores, and the sum of squares that it returns."""

import itertools
import math

import pytest
import torch

from tests.unit.ops.reference import EPSILON, FLOATS, make_inputs


@pytest.mark.parametrize("add", [False, True])
def test_result_is_torchs_for_every_combination_of_types(op, add):
    for dst_type, src_type, numel in itertools.product(FLOATS, FLOATS, (0, 1, 15, 16, 17, 1025, 600_011)):
        dst, src, _, _ = make_inputs(numel, (dst_type, src_type, src_type, src_type))
        expected = (dst.float() + src.float() if add else src.float()).to(dst_type)
        total = op.accumulate(dst, src, add, 2)
        assert torch.equal(dst, expected)
        # Squares are exact in double; the sums differ by the order of additions, each within one rounding.
        exact = math.fsum(expected.double().square().tolist())
        assert total == pytest.approx(exact, rel=2.0**-52 * max(1, numel) ** 0.5)


def test_sum_of_squares_is_that_of_accumulate(op):
    for numel, dtype in itertools.product((0, 1, 17, 5000, 300_007), FLOATS):
        dst, src, _, _ = make_inputs(numel, (dtype,) * 4)
        assert op.accumulate(dst, src, False, 2) == op.sum_of_squares(src, 2)


def test_sum_depends_on_no_thread_count_and_no_alignment(op):
    for numel in (100, 70_001, 5_000_003):
        sums = {
            op.sum_of_squares(make_inputs(numel, (torch.bfloat16,) * 4, offset)[0], threads)
            for threads in (1, 2, 3, 8)
            for offset in (0, 3)
        }
        assert len(sums) == 1


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 70_000, 100_000])
def test_any_non_finite_element_makes_the_sum_non_finite(op, bad, place):
    src = torch.ones(100_001, dtype=torch.bfloat16)
    src[place] = bad
    dst = torch.zeros(100_001)
    assert not math.isfinite(op.accumulate(dst, src, True, 2))
    assert not math.isfinite(op.sum_of_squares(src, 2))


def test_largest_finite_values_make_a_finite_sum(op):
    src = torch.full((100_000,), torch.finfo(torch.float32).max)
    assert math.isfinite(op.sum_of_squares(src, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_storing_16_bits_and_reading_them_back_is_lossless(op, dtype):
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(dtype)
    wide, again = torch.zeros(65536), torch.zeros(65536, dtype=dtype)
    op.accumulate(wide, numbers, False, 1)
    op.accumulate(again, wide, False, 1)
    kept = ~numbers.isnan()
    assert torch.equal(wide[kept], numbers[kept].float())
    assert torch.equal(again[kept].view(torch.int16), bits[kept])
    assert wide[~kept].isnan().all()
    assert again[~kept].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrowing_rounds_to_nearest_even_with_denormals_kept(op, dtype):
    floats = (torch.arange(2**21, dtype=torch.int64) * 2039 - 2**31).to(torch.int32).view(torch.float32)
    representable = torch.arange(-32768, 32767, dtype=torch.int32).to(torch.int16).view(dtype).float()
    ties = (representable[:-1] + representable[1:]) / 2
    floats = torch.cat([floats, ties[ties.isfinite()]])
    narrow = torch.zeros(floats.numel(), dtype=dtype)
    op.accumulate(narrow, floats, False, 1)
    number = ~floats.isnan()
    assert torch.equal(narrow[number].view(torch.int16), floats[number].to(dtype).view(torch.int16))
    assert narrow[~number].isnan().all()


def test_many_16_bit_gradients_add_up_in_fp32(op):
    """256 gradients of 1e-3: a bf16 accumulator would stall, an fp32 one has its own roundings only."""
    grad = torch.full((1000,), 1e-3, dtype=torch.bfloat16)
    total = torch.zeros(1000)
    for _ in range(256):
        op.accumulate(total, grad, True, 1)
    expected = 256 * grad.double()
    assert (total.double() - expected).abs().max() <= 256 * EPSILON[torch.float32] / 2 * expected.max()


def test_bad_tensor_is_an_error_that_names_the_argument(op):
    with pytest.raises(ValueError, match="^src: expected 4 elements, got 5"):
        op.accumulate(torch.zeros(4), torch.zeros(5), True, 1)
    with pytest.raises(ValueError, match="^dst: expected a contiguous tensor"):
        op.accumulate(torch.zeros(4, 2)[:, 0], torch.zeros(4), True, 1)
    with pytest.raises(ValueError, match="^src: expected a dense CPU tensor, got meta"):
        op.sum_of_squares(torch.zeros(4, device="meta"), 1)
