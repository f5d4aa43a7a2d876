"""On several GPUs each rank trains on its own, without a word about devices in the script."""

import os
import subprocess
import sys

import pytest
import torch

from tests.unit.source_tree import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

SCRIPT = """
import torch
import deepspeed

config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
torch.manual_seed(0)
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(64, 64), config=config)
for _ in range(3):
    inputs = torch.ones(4, 64, device=engine.device, dtype=torch.bfloat16)
    engine.backward(engine(inputs).float().square().mean())
    engine.step()
weights = [torch.empty_like(engine.module.weight) for _ in range(2)]
torch.distributed.all_gather(weights, engine.module.weight.detach())
assert torch.equal(*weights)
rank = torch.distributed.get_rank()
assert engine.device == torch.device("cuda", rank), engine.device
print(f"rank {rank} is done\\n", end="")
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    "launcher",
    [
        ["-m", "torch.distributed.run", "--nproc_per_node=2"],
        ["-c", "from deepspeed.launcher.runner import main; main()"],
    ],
)
def test_each_rank_trains_on_the_gpu_of_its_local_rank(launcher, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "0,1"}
    command = [sys.executable, *launcher, str(script)]
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    assert "rank 0 is done" in run.stdout and "rank 1 is done" in run.stdout
