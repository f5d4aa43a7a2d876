"""The `deepspeed` line that `accelerate launch` builds for two hosts runs, with stand-ins of ssh and MPI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.launching import JOBS, clients
from tests.distributed.test_launcher_hosts import port, reports, two_hosts  # noqa: F401

pytestmark = clients("accelerate")


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "nossh"])
def test_two_hosts_train_together(launcher, port):  # noqa: F811
    command = Path("bin/deepspeed")
    command.write_text(f"#!{sys.executable}\nfrom deepspeed.launcher.runner import main\nmain()\n")
    command.chmod(0o755)
    Path(".deepspeed_env").unlink()  # accelerate writes its own
    flags = [
        *("--use_deepspeed", "--zero_stage=2", "--offload_optimizer_device=cpu", "--gradient_clipping=0.0"),
        *("--num_machines=2", "--num_processes=2", "--mixed_precision=no", "--dynamo_backend=no"),
        *("--deepspeed_hostfile=hostfile", f"--deepspeed_multinode_launcher={launcher}"),
        *("--main_process_ip=127.0.0.1", f"--main_process_port={port}"),
    ]
    words = [sys.executable, "-m", "accelerate.commands.launch", *flags]
    script = [str(JOBS / "accelerate_hosts_job.py"), "--x"]
    machines = (0, 1) if launcher == "nossh" else (0,)
    started = [
        subprocess.Popen(
            [*words, f"--machine_rank={machine}", *script],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for machine in machines
    ]  # fmt: skip
    outputs = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(machines), outputs
    local_rank = ["--local_rank=0"] if launcher == "nossh" else []
    assert len(os.listdir("out")) == 2
    for rank, seen in enumerate(reports()):
        assert seen["engine"] == "DeepSpeedEngine"
        assert seen["ranks"] == [rank, 2, rank]
        assert seen["argv"] == [*local_rank, "--x"]
        assert seen["norm"] == pytest.approx(3.0), "of the mean, 1.5, over four weights"
