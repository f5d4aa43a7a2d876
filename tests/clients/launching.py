"""Starts a client's job as its users do, on two gloo ranks, and collects what each rank reports.

Importing a client takes seconds a process, so one job checks a list of settings and reports once. Nothing
here imports a client: in an environment without them the tests are skipped, and `make test-clients` fails.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.source_tree import ROOT

JOBS = Path(__file__).with_name("jobs")
WORLD = 2
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORLD}"],
    "accelerate": [
        *("-m", "accelerate.commands.launch", "--num_machines=1", f"--num_processes={WORLD}"),
        *("--main_process_port=0", "--dynamo_backend=no"),
    ],  # and in `flags` --multi_gpu or --use_deepspeed: neither asks for a GPU; --cpu would start one process
    "deepspeed": [
        *("-c", "from deepspeed.launcher.runner import main; main()"),
        *("--hostfile", "None", "--num_gpus", str(WORLD)),
    ],
    "itself": [],  # the script starts the other rank, as Lightning's Trainer does
}
_LOG_TAIL_CHARS = 6000


def clients(*modules):
    """Marks of a test module that needs these clients: skipped without them, an error in make test-clients.

    Use as `pytestmark = clients("transformers", "accelerate")`.
    """
    marks = [pytest.mark.clients, pytest.mark.timeout(600)]
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing and os.environ.get("DS_REQUIRE_CLIENTS"):
        raise RuntimeError(
            f"{', '.join(missing)}: expected to be installed, got nothing. See test-clients in Makefile."
        )
    reason = f"{', '.join(missing)} not installed; run make test-clients"
    return [*marks, pytest.mark.skip(reason=reason)] if missing else marks


@dataclass(frozen=True)
class Finished:
    """A job that came to its end."""

    returncode: int
    output: str  # stdout and stderr of the launcher and of all ranks
    reports: list  # of each rank that reported, in rank order

    def check(self):
        """Returns the reports of a job that went well on every rank."""
        assert self.returncode == 0 and len(self.reports) == WORLD, self.output[-_LOG_TAIL_CHARS:]
        return self.reports


def run_job(script, task, folder, launcher="torchrun", flags=(), limit_s=300.0):
    """Run a job of tests/clients/jobs to its end and return it `Finished`; no process outlives the call.

    Args:
        script: file name in tests/clients/jobs.
        task: what the job reads with `jobs.common.read_task`; JSON.
        folder: an empty folder that becomes the working directory. Reports are files in it.
        launcher: key of LAUNCHERS.
        flags: more flags of the launcher.
        limit_s: the job is killed after that many seconds, and the test fails.
    """
    folder = Path(folder)
    (folder / "reports").mkdir(parents=True, exist_ok=True)
    env = {
        **os.environ,
        "CLIENT_TASK": json.dumps(task),
        "CLIENT_REPORTS": str(folder / "reports"),
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "false",
    }
    for old in (folder / "reports").iterdir():
        old.unlink()
    if launcher == "deepspeed":  # which takes 29500 if it is free, as every job beside this one may
        flags = [*flags, "--master_port", str(_free_port())]
    command = [sys.executable, *LAUNCHERS[launcher], *flags, str(JOBS / script)]
    with tempfile.TemporaryDirectory(prefix="job") as scratch:  # torchrun leaves folders behind
        job = subprocess.Popen(
            command,
            env={**env, "TMPDIR": scratch},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = job.communicate(timeout=limit_s)
        finally:
            if job.poll() is None:  # torchrun's ranks are sessions of their own, and end at its SIGTERM only
                job.send_signal(signal.SIGTERM)
                job.wait(timeout=60)
    reports = [json.loads(path.read_text()) for path in sorted((folder / "reports").glob("*.json"))]
    return Finished(job.returncode, output, reports)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
