"""The op in plain torch, for machines without a compiler, against the compiled one."""

import itertools
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from deepspeed.ops.op_builder import CPUAdamBuilder
from tests.unit.ops.reference import FLOATS, Settings, assert_rounded, make_inputs, step_in_float64


@pytest.fixture
def torch_op(monkeypatch):
    monkeypatch.setenv("DS_CPU_ADAM", "torch")
    return CPUAdamBuilder().load()


@pytest.mark.parametrize("adamw_mode", [True, False])
def test_step_matches_float64_for_every_combination_of_types(torch_op, adamw_mode):
    for master_type, grad_type, moment_type, out_type in itertools.product(
        FLOATS, FLOATS, FLOATS, (None, *FLOATS)
    ):
        s = Settings(adamw_mode=adamw_mode)
        tensors = make_inputs(131, (master_type, grad_type, moment_type, moment_type))
        before = [tensor.double() for tensor in tensors]
        p, m, v = step_in_float64(*tensors, s)
        out = None if out_type is None else torch.zeros(131, dtype=out_type)
        torch_op.adam_step(*tensors, out, *s.args())
        gradient = before[1].abs() + before[0].abs()
        assert_rounded(tensors[0], p, (before[0], (p - before[0]).abs()), "master")
        assert_rounded(tensors[2], m, (before[2], gradient), "exp_avg")
        assert_rounded(tensors[3], v, (before[3], gradient**2), "exp_avg_sq")
        if out is not None:
            assert_rounded(out, p, (before[0], (p - before[0]).abs()), "out")


def test_gradients_accumulate_as_in_the_compiled_op(torch_op, op):
    for numel, dst_type, src_type, add in itertools.product((0, 5, 600_011), FLOATS, FLOATS, (True, False)):
        ours, src, _, _ = make_inputs(numel, (dst_type, src_type, src_type, src_type))
        theirs = ours.clone()
        # Exact squares, added in another order: within a few roundings of double.
        assert torch_op.accumulate(ours, src, add, 2) == pytest.approx(
            op.accumulate(theirs, src, add, 2), rel=1e-13
        )
        assert torch.equal(ours, theirs)


def test_bad_tensors_are_errors_that_name_the_argument(torch_op):
    tensors = [*make_inputs(32, (torch.float32,) * 4), torch.zeros(32)]
    for place, name in enumerate(("master", "grad", "exp_avg", "exp_avg_sq", "out")):
        spoiled = [*tensors]
        spoiled[place] = tensors[place].to("meta")
        with pytest.raises(ValueError, match=f"^{name}: expected a contiguous CPU tensor"):
            torch_op.adam_step(*spoiled, *Settings().args())
    with pytest.raises(ValueError, match="^src: expected 4 elements, got 5"):
        torch_op.accumulate(torch.zeros(4), torch.zeros(5), True, 1)


def test_a_machine_without_compiler_trains_when_told_to_use_torch(tmp_path):
    code = """
        import torch
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        param, twin = (torch.nn.Parameter(torch.linspace(-1, 1, 99)) for _ in range(2))
        optimizer = DeepSpeedCPUAdam([param], weight_decay=0.1)
        reference = torch.optim.AdamW([twin], weight_decay=0.1)
        for _ in range(5):
            param.grad = torch.linspace(1, 2, 99)
            twin.grad = param.grad.clone()
            optimizer.step()
            reference.step()
        assert torch.allclose(param, twin, rtol=1.2e-6, atol=1e-7)  # 5 steps of 2 ulp
        """
    environment = {**os.environ, "CXX": "/bin/false", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "Or set DS_CPU_ADAM=torch" in refused.stderr
    subprocess.run(command, env={**environment, "DS_CPU_ADAM": "torch"}, check=True)


def test_unknown_choice_is_an_error(monkeypatch):
    monkeypatch.setenv("DS_CPU_ADAM", "numpy")
    with pytest.raises(ValueError, match="^DS_CPU_ADAM: expected torch or nothing, got 'numpy'"):
        CPUAdamBuilder().load()
