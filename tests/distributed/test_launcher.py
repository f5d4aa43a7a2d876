"""The `deepspeed` command runs ranks to their end, and ends them all when one fails."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepspeed.launcher import devices, runner
from tests.unit.source_tree import ROOT

# Each rank leaves what it saw in a file of its own: `out/<rank>`.
REPORT = """
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE CROSS_RANK MASTER_ADDR".split()
seen = {"argv": sys.argv[1:], **{name: os.environ[name] for name in names}}
open(f"out/{os.environ['RANK']}", "w").write(json.dumps(seen))
print("hello from", os.environ["RANK"])
"""
COMMAND = [sys.executable, "-c", "from deepspeed.launcher.runner import main; main()", "--hostfile", "None"]


@pytest.fixture(autouse=True)
def _work_here(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setattr(devices, "accelerator_count", lambda: 0)


def write(text, name="script.py"):
    Path(name).write_text(text)
    return name


def launch(*words):
    """Run the command in this process and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        runner.main(["--hostfile", "None", *words])
    return caught.value.code


def reports():
    return [json.loads(Path("out", name).read_text()) for name in sorted(os.listdir("out"))]


def wait_until_gone(pid, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_the_command_runs_as_a_module():
    words = ["-m", "deepspeed.launcher.runner", "--hostfile", "None", "--num_gpus", "2", write(REPORT)]
    subprocess.run([sys.executable, *words], check=True)
    assert len(reports()) == 2


def test_every_rank_learns_its_place_and_gets_its_arguments():
    assert launch("--num_gpus", "2", write(REPORT), "--lr", "1") == 0
    first, second = reports()
    assert (first["argv"], second["argv"]) == (
        ["--local_rank=0", "--lr", "1"],
        ["--local_rank=1", "--lr", "1"],
    )
    assert (
        [rank["RANK"] for rank in (first, second)]
        == ["0", "1"]
        == [rank["LOCAL_RANK"] for rank in (first, second)]
    )
    for rank in (first, second):
        assert rank["WORLD_SIZE"] == rank["LOCAL_WORLD_SIZE"] == rank["LOCAL_SIZE"] == "2"
        assert (rank["CROSS_RANK"], rank["MASTER_ADDR"]) == ("0", "127.0.0.1")


def test_a_module_without_local_rank_logging_to_files():
    write(REPORT, "train_module.py")
    assert (
        launch(
            "--num_gpus", "2", "--no_local_rank", "--enable_each_rank_log", "logs", "--module", "train_module"
        )
        == 0
    )
    assert [rank["argv"] for rank in reports()] == [[], []]
    logs = sorted(os.listdir("logs"))
    assert [name.rsplit("_", 1)[1] for name in logs] == ["rank0.log", "rank1.log"]
    assert [Path(f"logs/{name}").read_text() for name in logs] == ["hello from 0\n", "hello from 1\n"]


def test_a_program_that_is_not_python():
    script = write('#!/bin/sh\necho "{\\"argv\\": \\"$*\\"}" > out/$RANK\n', "train.sh")
    os.chmod(script, 0o755)
    assert launch("--no_python", "./train.sh", "x") == 0
    assert reports() == [{"argv": "--local_rank=0 x"}]


def test_a_failing_rank_ends_the_job_with_its_exit_code_and_takes_the_others_with_it(caplog):
    script = write(
        "import os, sys, time\n"
        "open(f\"out/{os.environ['RANK']}\", 'w').write(str(os.getpid()))\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not os.path.exists('out/0'): time.sleep(0.01)\n"
        "    sys.exit(3)\n"
        "time.sleep(600)\n"
    )
    assert launch("--num_gpus", "2", script) == 3
    assert wait_until_gone(int(Path("out/0").read_text()))
    assert "rank 1" in caplog.text
    assert "ended with exit code 3" in caplog.text


def test_a_rank_killed_by_a_signal_is_reported_as_a_shell_would():
    script = write("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert launch(script) == 128 + signal.SIGKILL


def test_stopping_the_command_stops_its_ranks():
    script = write(
        "import os, time\nopen(f\"out/{os.environ['RANK']}\", 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    job = subprocess.Popen(
        [*COMMAND, "--num_gpus", "2", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while len(os.listdir("out")) < 2 or not all(Path(f"out/{rank}").read_text() for rank in (0, 1)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=60) == 128 + signal.SIGTERM
        assert all(wait_until_gone(int(Path(f"out/{rank}").read_text())) for rank in (0, 1))
    finally:
        job.kill()


def test_a_job_finds_another_port_when_the_default_one_is_taken_and_its_ranks_meet(monkeypatch):
    script = write(
        "import os, torch, deepspeed\n"
        "deepspeed.init_distributed()\n"
        "total = torch.ones(1)\n"
        "deepspeed.comm.all_reduce(total)\n"
        "text = '{\"total\": %d, \"port\": %s}' % (int(total), os.environ['MASTER_PORT'])\n"
        "open(f\"out/{os.environ['RANK']}\", 'w').write(text)\n"
    )
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        monkeypatch.setattr(runner, "_DEFAULT_PORT", held.getsockname()[1])
        assert launch("--num_gpus", "2", script) == 0
        assert [rank["total"] for rank in reports()] == [2, 2]
        assert held.getsockname()[1] not in [rank["port"] for rank in reports()]
