"""Stock DeepSpeed's own Python trains on this op, through the entry points that it knows."""

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.compat

STOCK = os.environ.get("DS_STOCK_PYTHON")

CODE = """
    import gc, sys, torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from op_builder import CPUAdamBuilder as Lean

    assert "lean" not in __import__("deepspeed").__version__
    ours = Lean().load()
    CPUAdamBuilder.load = lambda self, *args, **kwargs: ours
    for mode, reference_cls in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(33, 5))
        twin = torch.nn.Parameter(param.detach().clone())
        optimizer = DeepSpeedCPUAdam([param], lr=0.01, weight_decay=0.1, adamw_mode=mode)
        reference = reference_cls([twin], lr=0.01, weight_decay=0.1)
        for _ in range(5):
            param.grad = torch.randn(33, 5)
            twin.grad = param.grad.clone()
            optimizer.step()
            reference.step()
        assert torch.allclose(param, twin, rtol=1.2e-6, atol=1e-7)  # 5 steps of 2 ulp
        del optimizer
        gc.collect()
    print("trained")
    """


@pytest.mark.skipif(STOCK is None, reason="set DS_STOCK_PYTHON to an interpreter with stock DeepSpeed")
def test_stocks_optimizer_trains_on_this_op(tmp_path):
    root = Path(__file__).parents[2]
    (tmp_path / "op_builder").symlink_to(root / "op_builder")
    (tmp_path / "csrc").symlink_to(root / "csrc")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [STOCK, "-c", textwrap.dedent(CODE)]
    result = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("trained\n")
