"""The guides of Lightning and of plain scripts run as they stand, under each launcher that they name."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.launching import clients
from tests.unit.source_tree import ROOT

pytestmark = clients("lightning")

# What this machine lacks: the GPUs that Lightning asks for.
ON_CPU = "from tests.clients.jobs.lightning_on_cpu import allow_cpu; allow_cpu()\n"
GPUS, CPUS = 'accelerator="gpu",', 'accelerator="cpu", devices=2,'
# srun on one node of two tasks, as far as a rank can see.
SRUN = """#!{python}
import os, subprocess, sys
place = dict(SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="2", SLURM_NODEID="0")
place |= dict(SLURM_STEP_NODELIST="localhost", SLURM_CPUS_PER_TASK=sys.argv[1].rpartition("=")[2])
ranks = [
    subprocess.Popen(sys.argv[2:], env=os.environ | place | dict(SLURM_PROCID=rank, SLURM_LOCALID=rank))
    for rank in "01"
]
sys.exit(max(rank.wait() for rank in ranks))
"""


def blocks_of(guide, language):
    text = (ROOT / "docs" / "guides" / f"{guide}.md").read_text()
    assert len(text.splitlines()) < 60
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run(command, folder, **env):
    env = {
        **os.environ,
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        **env,
    }
    done = subprocess.run(
        ["bash", "-ec", command], env=env, cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def free_port(first, last):
    for port in range(first, last):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", port)):
                return port
    raise AssertionError("no free port")


def test_a_plain_script_runs_and_goes_on_under_each_launcher(tmp_path):
    guide = "torchrun_and_slurm"
    (tmp_path / "train.py").write_text(blocks_of(guide, "python")[0])
    (tmp_path / "train.sbatch").write_text(blocks_of(guide, "sh")[0])
    (tmp_path / "srun").write_text(SRUN.format(python=sys.executable))
    (tmp_path / "srun").chmod(0o755)
    job = free_port(20000, 30000) - 20000
    outputs = [
        *(run(line, tmp_path) for line in blocks_of(guide, "bash")[0].splitlines()),
        run("bash train.sbatch", tmp_path, SLURM_JOB_ID=str(job), SLURM_CPUS_PER_TASK="1"),
    ]
    found = [re.search(r"^step (\d+) loss ([\d.]+)$", output, re.MULTILINE).groups() for output in outputs]
    assert [int(steps) for steps, _ in found] == [8, 16, 24], "each run goes on where the last one ended"
    assert float(found[2][1]) < float(found[0][1])


def test_a_plain_script_runs_as_two_machines_of_torchrun(tmp_path):
    text = (ROOT / "docs" / "guides" / "torchrun_and_slurm.md").read_text()
    command = re.search(r"`(torchrun --nnodes [^`]*)`", text).group(1)
    command = command.replace("nproc_per_node 8", "nproc_per_node 1")
    command = command.replace("HOST:29500", f"localhost:{free_port(20000, 30000)}")
    (tmp_path / "train.py").write_text(blocks_of("torchrun_and_slurm", "python")[0])
    assert "step 8 loss" in run(f"{command} & {command}; wait $!", tmp_path)


@pytest.mark.parametrize("index", [0, 1], ids=["Trainer", "Fabric"])
def test_lightning_trains(index, tmp_path):
    text = blocks_of("lightning", "python")[index]
    assert GPUS in text
    (tmp_path / "train.py").write_text(ON_CPU + text.replace(GPUS, CPUS))
    run("python train.py", tmp_path)
    if index:
        assert (tmp_path / "last.ckpt" / "latest").exists()
    else:
        folder = next(tmp_path.glob("lightning_logs/version_*/checkpoints/*.ckpt"))
        run(f"python '{folder}/zero_to_fp32.py' '{folder}' weights", tmp_path)
        assert any((tmp_path / "weights").iterdir())
