"""The fused step against float64, at every size, alignment, type, level and thread count."""

import itertools
import json
import os
import platform
import subprocess
import sys
import threading

import pytest
import torch

from tests.unit.ops.reference import FLOATS, Settings, assert_rounded, make_inputs, step_in_float64

SIZES = (*range(68), 1023, 1024, 1025, 1_000_003)
LEVELS = ("neon",) if platform.machine() == "aarch64" else ("avx2", "avx512")


def check_step(op, numel, dtypes, out_type, offset=0, settings=None):
    s = settings or Settings()
    tensors = make_inputs(numel, dtypes, offset)
    before = [tensor.double() for tensor in tensors]
    p, m, v = step_in_float64(*tensors, s)
    out = None if out_type is None else torch.zeros(numel + offset, dtype=out_type)[offset:]
    op.adam_step(*tensors, out, *s.args())
    gradient = before[1].abs() + before[0].abs()
    assert_rounded(tensors[2], m, (before[2], gradient), "exp_avg")
    assert_rounded(tensors[3], v, (before[3], gradient**2), "exp_avg_sq")
    update = (p - before[0]).abs()
    assert_rounded(tensors[0], p, (before[0], update), "master")
    if out is not None:
        assert_rounded(out, p, (before[0], update), "out")
    assert torch.equal(tensors[1].double(), before[1]), "the gradient is never rewritten"


@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_step_matches_float64_at_every_size(op, half, adamw_mode):
    for numel in SIZES:
        dtypes = (torch.float32, half, torch.float32, torch.float32)
        check_step(op, numel, dtypes, half, settings=Settings(adamw_mode=adamw_mode))


@pytest.mark.parametrize("numel", [1, 17, 67, 1025])
def test_step_matches_float64_at_every_misalignment(op, numel):
    for offset in range(1, 16):
        check_step(
            op, numel, (torch.float32, torch.bfloat16, torch.float32, torch.float32), torch.bfloat16, offset
        )


@pytest.mark.parametrize("out_type", [None, *FLOATS])
def test_step_matches_float64_for_every_combination_of_types(op, out_type):
    for master_type, grad_type, moment_type in itertools.product(FLOATS, FLOATS, FLOATS):
        check_step(op, 131, (master_type, grad_type, moment_type, moment_type), out_type)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(bias_correction=False),
        Settings(beta1=0.0),
        Settings(beta1=0.3, beta2=0.5),
        Settings(weight_decay=0.0, adamw_mode=False),
        Settings(step=1),
        Settings(step=100_000, grad_scale=1 / 65536),
    ],
)
def test_step_matches_float64_for_every_setting(op, settings):
    check_step(op, 1025, (torch.float32,) * 4, torch.bfloat16, settings=settings)


@pytest.mark.parametrize("out_type", FLOATS)
def test_out_is_the_new_master_rounded_as_torch_rounds(op, out_type):
    tensors = make_inputs(700_001, (torch.float32, torch.bfloat16, torch.float32, torch.float32))
    out = torch.empty(700_001, dtype=out_type)
    op.adam_step(*tensors, out, *Settings().args())
    assert torch.equal(out, tensors[0].to(out_type))


def run_probe(level):
    """Returns the probe's digests at one level, or None if this processor has no such level."""
    environment = {**os.environ, "DS_SIMD_LEVEL": level}
    command = [sys.executable, "-m", "tests.unit.ops.level_probe"]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=150, check=False
    )
    if "DS_SIMD_LEVEL" in result.stderr:
        return None
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["level"] == level
    return answer["results"]


def test_all_levels_of_this_processor_compute_the_same_bits(op):
    expected = run_probe("scalar")
    found = {level: run_probe(level) for level in LEVELS}
    present = [level for level, results in found.items() if results is not None]
    assert op.simd_level() in [*present, "scalar"]
    for level in present:
        different = [key for key, value in expected.items() if found[level][key] != value]
        assert not different, f"{level} differs from scalar in {len(different)}: {different[:5]}"


def test_unknown_level_is_an_error_that_names_the_variable():
    environment = {**os.environ, "DS_SIMD_LEVEL": "sse9"}
    code = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load().simd_level()"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode != 0
    assert "DS_SIMD_LEVEL: expected a level that this processor has, got 'sse9'" in result.stderr


def test_thread_count_changes_no_bit(op):
    results = []
    for threads in (1, 2, 3, 7):
        tensors = make_inputs(200_003, (torch.float32, torch.bfloat16, torch.float32, torch.float32))
        out = torch.empty(200_003, dtype=torch.bfloat16)
        op.adam_step(*tensors, out, *Settings(num_threads=threads).args())
        results.append([*tensors, out])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_splitting_a_step_into_tiles_of_a_prime_size_changes_no_bit(op):
    whole = make_inputs(50_021, (torch.float32, torch.bfloat16, torch.float32, torch.float32))
    tiled = [tensor.clone() for tensor in whole]
    op.adam_step(*whole, None, *Settings().args())
    for start in range(0, 50_021, 101):
        op.adam_step(*(tensor[start : start + 101] for tensor in tiled), None, *Settings().args())
    assert all(torch.equal(a, b) for a, b in zip(whole, tiled, strict=True))


def test_equal_inputs_give_equal_outputs_wherever_they_lie(op):
    first = make_inputs(1_003, (torch.float32,) * 4)
    op.adam_step(*first, None, *Settings().args())
    for offset in (1, 5, 16):
        other = make_inputs(1_003, (torch.float32,) * 4, offset)
        op.adam_step(*other, None, *Settings().args())
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_denormal_values_count_as_zero_inside_and_are_untouched_outside(op):
    master, grad, exp_avg, exp_avg_sq = make_inputs(100_000, (torch.float32,) * 4)
    exp_avg.zero_()
    op.adam_step(master, torch.full_like(grad, 1e-40), exp_avg, exp_avg_sq, None, *Settings().args())
    assert not exp_avg.any()
    # On all threads of torch's pool the processor must again keep denormals.
    assert torch.full((1_000_000,), 1e-40).mul(0.5).all()


def test_non_finite_gradient_reaches_its_own_element_only(op):
    tensors = make_inputs(1000, (torch.float32,) * 4)
    tensors[1][500] = float("nan")
    op.adam_step(*tensors, None, *Settings().args())
    for tensor in (tensors[0], tensors[2], tensors[3]):
        assert tensor.isnan().nonzero().flatten().tolist() == [500]


def test_python_runs_while_the_kernel_does(op):
    """With an endless switch interval, this thread runs only if the other gives the lock up inside the op."""
    tensors = make_inputs(4_000_000, (torch.float32,) * 4)
    started, log = threading.Event(), []

    def work():
        started.set()
        for _ in range(20):
            op.adam_step(*tensors, None, *Settings(num_threads=1).args())
        log.append("worker done")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        log.append("main ran")
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert log == ["main ran", "worker done"]


def test_a_call_allocates_nothing():
    """Peak memory of a process during calls on 16 MB arrays grows by less than one of them.

    256 KiB are allowed: pages of code and stacks that are touched for the first time.
    """
    code = """
import re, torch
from deepspeed.ops.op_builder import CPUAdamBuilder
from tests.unit.ops.reference import Settings, make_inputs
op = CPUAdamBuilder().load()
def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
tensors = make_inputs(4_000_000, (torch.float32, torch.bfloat16, torch.float32, torch.float32))
out = torch.zeros(4_000_000, dtype=torch.bfloat16)
def call():
    op.adam_step(*tensors, out, *Settings().args())
    op.accumulate(tensors[2], tensors[1], True, 2)
    op.sum_of_squares(tensors[3], 2)
small = [tensor[:100_000] for tensor in tensors]
op.adam_step(*small, out[:100_000], *Settings().args())
open("/proc/self/clear_refs", "w").write("5")
before = status("VmHWM")
call()
print(status("VmHWM") - before)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stdout) <= 256


@pytest.mark.parametrize("name", ["master", "grad", "exp_avg", "exp_avg_sq", "out"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: t.to("meta"), "expected a dense CPU tensor, got meta"),
        (lambda t: t.double(), "expected dtype float32, bfloat16 or float16, got Double"),
        (lambda t: t.int(), "expected dtype float32, bfloat16 or float16, got Int"),
        (lambda t: t.repeat(2)[::2], "expected a contiguous tensor"),
        (lambda t: t.to_sparse(), "expected a dense CPU tensor"),
    ],
)
def test_bad_tensor_is_an_error_that_names_the_argument(op, name, spoil, words):
    names = ("master", "grad", "exp_avg", "exp_avg_sq", "out")
    tensors = dict(zip(names, [*make_inputs(32, (torch.float32,) * 4), torch.zeros(32)], strict=True))
    tensors[name] = spoil(tensors[name])
    with pytest.raises(ValueError, match=f"^{name}: {words}") as error:
        op.adam_step(*tensors.values(), *Settings().args())
    assert "frame #" not in str(error.value)


@pytest.mark.parametrize("name", ["grad", "exp_avg", "exp_avg_sq", "out"])
def test_tensor_of_another_size_is_an_error_that_names_it(op, name):
    names = ("master", "grad", "exp_avg", "exp_avg_sq", "out")
    tensors = dict(zip(names, [*make_inputs(32, (torch.float32,) * 4), torch.zeros(32)], strict=True))
    tensors[name] = tensors[name][:31]
    with pytest.raises(ValueError, match=f"^{name}: expected 32 elements, got 31"):
        op.adam_step(*tensors.values(), *Settings().args())


def test_step_zero_is_an_error(op):
    with pytest.raises(ValueError, match="^step: expected 1 or more, got 0"):
        op.adam_step(*make_inputs(4, (torch.float32,) * 4), None, *Settings(step=0).args())
