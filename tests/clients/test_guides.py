"""The guides' examples run as they stand: files from their blocks, then the commands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.launching import clients
from tests.unit.source_tree import ROOT

pytestmark = clients("transformers", "accelerate")

FILES = {"json": "ds.json", "python": "train.py"}
# Guide -> what its run leaves in the folder, and words of its output.
LEAVES = {
    "trainer": (["out/checkpoint-4/latest", "final/model.safetensors", "fp32"], "train_loss"),
    "accelerate": (["state/latest", "state/pytorch_model/mp_rank_00_model_states.pt"], "of DeepSpeedEngine"),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_guide_runs(name, tmp_path):
    text = (ROOT / "docs" / "guides" / f"{name}.md").read_text()
    assert len(text.splitlines()) < 60
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL))
    for kind, file in FILES.items():
        if kind in blocks:
            (tmp_path / file).write_text(blocks[kind])
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),  # torchrun leaves folders behind
    }
    command = ["bash", "-ec", blocks["bash"]]
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    files, words = LEAVES[name]
    assert words in run.stdout
    assert [file for file in files if not (tmp_path / file).exists()] == []
