"""The command lines that start a job on several hosts, and what each host makes of them."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from deepspeed.launcher import devices, runner
from deepspeed.launcher.arguments import parse_args
from deepspeed.launcher.environment import exported_environment
from deepspeed.launcher.job import HostsJob
from deepspeed.launcher.multinode import LAUNCHERS, build_commands
from deepspeed.launcher.node import find_node_rank

ADDRESS = ("--master_addr", "10.0.0.1")


@pytest.fixture(autouse=True)
def _work_here(tmp_path, monkeypatch):
    """Two hosts, and stand-ins for every launcher: here only their being on PATH counts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setattr(devices, "accelerator_count", lambda: 0)
    for name in list(os.environ):
        if name.startswith(("PYTHON", "NCCL", "MV2", "UCX", "MLFLOW")):
            monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    (tmp_path / "bin").mkdir()
    for program in {kind.program for kind in LAUNCHERS.values()} | {"ssh"}:
        stand_in(tmp_path / "bin" / program, "exit 0")
    Path("hostfile").write_text("worker-0 slots=4\nworker-1 slots=2\n")


def stand_in(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def plan(*words):
    options = parse_args(["--hostfile", "hostfile", *words])
    return options, runner.plan_job(options)


def command_of(*words):
    """The command lines, with the job's one long word put aside, the job in it, and their own environment."""
    options, job = plan(*words, *ADDRESS, "train.py", "--text", "50% 'of' $it")
    lines, own = build_commands(options.launcher, runner.plan_launch(options, job))
    text = job.to_text()
    assert HostsJob.from_text(text) == job
    return [[word.replace(text, "JOB") for word in line] for line in lines], own


NODE = [sys.executable, "-u", "-m", "deepspeed.launcher.node", "--job=JOB"]


def test_pdsh_starts_every_host_by_one_shell_line():
    ((*words, line),), own = command_of(
        "--launcher", "pdsh", "--ssh_port", "2222", "--launcher_args", "-t 5", "--venv_script", "/v/activate"
    )
    assert words == ["pdsh", "-S", "-f", "1024", "-w", "worker-0,worker-1", "-t", "5"]
    here = os.getcwd()
    start = shlex.join([*NODE, "--end_with_stdin"])
    assert line == f". /v/activate; export PYTHONPATH={here}; cd {here}; {start} --node_rank=%n"
    assert (own["PDSH_RCMD_TYPE"], own["PDSH_SSH_ARGS_APPEND"]) == ("ssh", "-p 2222")


def test_values_reach_a_host_as_they_are(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "50% 'of' $it")
    ((*_, line),), _ = command_of("--launcher", "pdsh")
    assert """export NCCL_DEBUG='50%% '"'"'of'"'"' $it';""" in line, "pdsh makes one percent sign of two"
    lines, _ = command_of("--launcher", "ssh")
    assert """export NCCL_DEBUG='50% '"'"'of'"'"' $it';""" in lines[0][-1]
    (line,), _ = command_of("--launcher", "mpich")
    assert line[line.index("NCCL_DEBUG") + 1] == "50% 'of' $it"


def test_ssh_runs_one_client_a_host():
    lines, _ = command_of("--launcher", "ssh", "--ssh_port", "2222")
    for number, line in enumerate(lines):
        assert line[:-1] == ["ssh", "-o", "BatchMode=yes", "-p", "2222", f"worker-{number}"]
        assert line[-1].endswith(shlex.join([*NODE, f"--node_rank={number}", "--end_with_stdin"]))


@pytest.mark.parametrize(
    ("launcher", "before"),
    [
        (
            "openmpi",
            "mpirun -n 2 --host worker-0:1,worker-1:1 --map-by node --bind-to none A B -x PYTHONPATH",
        ),
        ("mpich", "mpirun -n 2 -ppn 1 -hosts worker-0,worker-1 A B -genv PYTHONPATH HERE"),
        ("impi", "mpirun -genv I_MPI_PIN 0 -n 2 -ppn 1 -hosts worker-0,worker-1 A B -genv PYTHONPATH HERE"),
        (
            "mvapich",
            "mpirun -genv MV2_ENABLE_AFFINITY 0 -n 2 -ppn 1 -hosts worker-0,worker-1 A B "
            "-genv PYTHONPATH HERE",
        ),
        (
            "slurm",
            "srun --nodes 2 --ntasks 2 --ntasks-per-node 1 --nodelist worker-0,worker-1 --cpu-bind=none "
            "--kill-on-bad-exit=1 --export=ALL A B",
        ),
    ],
)
def test_mpi_and_slurm_start_one_process_a_host(launcher, before):
    (line,), own = command_of("--launcher", launcher, "--launcher_args", "A B")
    assert line == [*before.replace("HERE", os.getcwd()).split(), *NODE]
    assert own["PYTHONPATH"] == os.getcwd(), "srun and mpirun -x hand on what they find"


def test_every_host_runs_its_slots_of_the_chosen_ones(monkeypatch):
    monkeypatch.setattr(devices, "accelerator_count", lambda: 4)
    _, job = plan("--include", "worker-1@worker-0:1,3", *ADDRESS, "--master_port", "7", "train.py")
    assert job.hosts == {"worker-0": [1, 3], "worker-1": [0, 1]}, "in the order of the hostfile, as stock"
    first, second = job.on_host(0), job.on_host(1)
    assert (first.num_ranks, first.node_rank, first.num_nodes) == (2, 0, 2)
    assert (second.node_rank, second.master_addr, second.master_port) == (1, "10.0.0.1", 7)
    assert first.env == {"CUDA_VISIBLE_DEVICES": "1,3"}
    environment = second.environment()
    assert [environment[name] for name in ("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")] == ["2", "1", "2"]


def test_the_line_that_accelerate_builds_for_several_machines_is_understood():
    for launcher in ("pdsh", "openmpi", "mvapich", "mpich", "slurm"):
        options, job = plan(
            "--no_local_rank", "--launcher", launcher, "--num_gpus", "2", "--master_addr", "10.0.0.1",
            "--master_port", "29501", "--module", "pkg.train", "--a",
        )  # fmt: skip
        assert job.program[-2:] == ("-m", "pkg.train")
        assert (job.script_args, job.pass_local_rank) == (("--a",), False)
        assert {len(slots) for slots in job.hosts.values()} == {2}
    _, job = plan("--node_rank", "1", "--no_ssh", "--num_gpus", "2", *ADDRESS, "t.py")
    assert job.on_host(1).num_nodes == 2


def test_the_first_host_is_asked_for_its_address(tmp_path):
    stand_in(tmp_path / "bin" / "ssh", 'echo "$@" > asked; echo 10.1.2.3 172.17.0.1')
    assert plan("--ssh_port", "22", "train.py")[1].master_addr == "10.1.2.3"
    assert Path("asked").read_text() == "-o BatchMode=yes -p 22 worker-0 hostname -I\n"
    for words in (["--no_ssh_check"], ["--launcher", "slurm"], ["--no_ssh", "--node_rank", "1"]):
        assert plan(*words, "train.py")[1].master_addr == "worker-0"


def test_hosts_without_a_hostfile_are_numbered_for_no_ssh():
    _, job = plan(
        "--hostfile", "None", "--num_nodes", "2", "--num_gpus", "3", "--no_ssh", "--node_rank", "1",
        *ADDRESS, "train.py",
    )  # fmt: skip
    assert (job.on_host(1).num_nodes, job.on_host(1).num_ranks, job.master_addr) == (2, 3, "10.0.0.1")


def test_one_host_of_the_hostfile_is_this_machine_unless_forced():
    options, job = plan("--num_nodes", "1", "train.py")
    assert not runner._uses_launcher(options, job)
    assert job.master_addr == "127.0.0.1"
    options, job = plan("--include", "worker-1", "--force_multi", *ADDRESS, "train.py")
    assert runner._uses_launcher(options, job)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hostfile", "None", "--num_nodes", "2"), "--num_nodes: expected 1 without a hostfile, got 2"),
        (("--no_ssh",), "--node_rank: expected 0 to 1 with --no_ssh, got nothing"),
        (("--no_ssh", "--node_rank", "2"), r"--node_rank: expected 0 to 1, .*worker-0, worker-1.*got 2"),
        (("--hostfile", "None", "--no_ssh", "--node_rank", "1"), "--node_rank: expected 0 to 0"),
        (("--node_rank", "1"), "--node_rank: expected it with --no_ssh only, got 1"),
        (
            ("--hostfile", "None", "--num_nodes", "2", "--no_ssh", "--node_rank", "0"),
            "--master_addr: expected the address of host 0",
        ),
        (
            ("--master_port", "0", *ADDRESS),
            "--master_port: expected a free port that is the same on all hosts",
        ),
        ((), "--master_addr: expected worker-0 to answer 'ssh .*' without a password"),
        (("--launcher", "teleport"), "--launcher: expected one of pdsh, ssh, openmpi"),
    ],
)
def test_what_is_missing_or_contradicts_is_named(words, message):
    with pytest.raises(ValueError, match=message):
        plan(*words, "train.py")


def test_a_launcher_that_is_not_installed_is_named(tmp_path):
    (tmp_path / "bin" / "srun").unlink()
    with pytest.raises(ValueError, match=r"--launcher: expected srun on PATH for slurm, got none\. Install"):
        plan("--launcher", "slurm", "train.py")


@pytest.mark.parametrize("flag", ["--ssh_port", "--venv_script"])
def test_flags_without_effect_are_refused(flag):
    with pytest.raises(ValueError, match=f"{flag}: expected pdsh or ssh as --launcher, got .* with slurm"):
        command_of("--launcher", "slurm", flag, "7")


def test_the_environment_file_goes_to_all_hosts(tmp_path, caplog):
    here = tmp_path
    (here / ".deepspeed_env").write_text("# ours\nA=1\nB=x=y z\n\nnot a variable\nBASH_FUNC_f%%=() {\nC=\n")
    (here / "home" / ".deepspeed_env").write_text("A=home\nD=4\n")
    env = {
        "NCCL_DEBUG": "INFO",
        "UCX_TLS": "tcp",
        "MV2_X": "1",
        "MLFLOW_Y": "2",
        "LANG": "C",
        "PYTHONPATH": "/p",
    }
    exports = exported_environment(env, [here / "home", here])
    assert exports == {
        "NCCL_DEBUG": "INFO", "UCX_TLS": "tcp", "MV2_X": "1", "MLFLOW_Y": "2", "PYTHONPATH": f"{here}:/p",
        "A": "1", "B": "x=y z", "C": "", "D": "4",
    }  # fmt: skip
    assert "expected KEY=VALUE in line 5, got 'not a variable'" in caplog.text
    assert "line 6" in caplog.text


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1"}, 1),
        ({"PMI_RANK": "0"}, 0),
        ({"SLURMD_NODENAME": "worker-1", "SLURM_NODEID": "0"}, 1),
        ({"SLURMD_NODENAME": "worker-1.cluster", "SLURM_NODEID": "0"}, 0),
    ],
)
def test_a_host_finds_its_number(env, expected):
    assert find_node_rank(["worker-0", "worker-1"], env) == expected


def test_a_host_without_a_number_says_what_to_do():
    with pytest.raises(ValueError, match=r"--launcher: expected one of OMPI_COMM_WORLD_RANK.*--no_ssh"):
        find_node_rank(["a", "b"], {"PMI_RANK": "7"})


def test_the_job_survives_its_way_as_text():
    job = HostsJob({"a": [0, 2], "b": [1]}, ("python", "x y"), ("--a", "%n 'q'"), "h", 7, "logs", False)
    assert HostsJob.from_text(job.to_text()) == job
