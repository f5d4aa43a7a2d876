"""A script that ends without destroying anything ends well."""

import os
import subprocess
import sys

from tests.unit import source_tree

SCRIPT = """
import torch
import deepspeed

config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
engine, optimizer, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
"""
LAUNCHES = 6  # without the exit hooks one in four of them aborted


def test_a_job_that_succeeded_is_not_aborted_at_its_exit(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(path)]
    for _ in range(LAUNCHES):
        done = subprocess.run(
            command, cwd=source_tree.ROOT, capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "PYTHONPATH": str(source_tree.ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
