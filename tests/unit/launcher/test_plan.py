"""What job a command line describes, without starting it."""

import os
import socket
import sys

import pytest

from deepspeed.launcher import devices, runner
from deepspeed.launcher.arguments import parse_args


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch):
    monkeypatch.setattr(devices, "accelerator_count", lambda: 0)


def plan(*words):
    """What this host runs of the job that a command line describes."""
    return plan_hosts(*words).on_host(0)


def plan_hosts(*words):
    return runner.plan_job(parse_args([*words]))


@pytest.fixture
def taken_port():
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        yield held.getsockname()[1]


def test_a_machine_without_accelerators_runs_one_process_unless_told_otherwise():
    assert plan("train.py").num_ranks == 1
    assert plan("--num_gpus", "3", "train.py").num_ranks == 3
    assert plan("--num_accelerators", "2", "train.py").num_ranks == 2


def test_every_device_gets_a_rank(monkeypatch):
    monkeypatch.setattr(devices, "accelerator_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job = plan("train.py")
    assert (job.num_ranks, job.env) == (4, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    job = plan("--include", "localhost:1,3", "train.py")
    assert (job.num_ranks, job.env) == (2, {"CUDA_VISIBLE_DEVICES": "1,3"})
    job = plan("--num_gpus", "2", "train.py")
    assert job.env == {"CUDA_VISIBLE_DEVICES": "0,1"}


def test_devices_that_the_user_made_visible_are_the_pool(monkeypatch):
    monkeypatch.setattr(devices, "accelerator_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert plan("train.py").env == {"CUDA_VISIBLE_DEVICES": "5,7"}
    assert plan("--exclude", "localhost:5", "train.py").env == {"CUDA_VISIBLE_DEVICES": "7"}


def test_the_rank_comes_before_the_scripts_own_arguments():
    job = plan("train.py", "--lr", "1", "--num_gpus", "9")
    assert job.command("now") == [
        sys.executable, "-u", "train.py", "--local_rank=${local_rank}", "--lr", "1", "--num_gpus", "9",
    ]  # fmt: skip
    assert plan("--no_local_rank", "train.py", "x").command("now") == [sys.executable, "-u", "train.py", "x"]


def test_modules_and_programs():
    assert plan("--module", "pkg.train").program == (sys.executable, "-u", "-m", "pkg.train")
    assert plan("--no_python", "./train.sh").program == ("./train.sh",)
    with pytest.raises(ValueError, match="--module: expected no --no_python beside it"):
        plan("--module", "--no_python", "train")


def test_the_line_that_accelerate_builds_is_understood():
    job = plan(
        "--hostfile", "None", "--node_rank", "0", "--no_ssh", "--num_gpus", "2", "--master_addr", "127.0.0.1",
        "--master_port", "0", "train.py", "--arg",
    )  # fmt: skip
    assert (job.num_ranks, job.master_addr, job.script_args) == (2, "127.0.0.1", ("--arg",))
    assert plan("--hostfile", "None", "--no_local_rank", "--launcher", "PDSH", "train.py").num_ranks == 1


def test_a_hostfile_of_one_host_is_this_machine(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("worker-0 slots=2\n")
    assert plan("--hostfile", str(path), "train.py").num_ranks == 2


@pytest.mark.parametrize(
    "words",
    [
        ("--bind_cores_to_rank",),
        ("--bind_core_list", "0-3"),
        ("--save_pid",),
        ("--autotuning", "run"),
    ],
)
def test_flags_of_missing_features_are_refused_by_name(words):
    with pytest.raises(NotImplementedError, match=f"{words[0]}: expected it to be off"):
        plan(*words, "train.py")


def test_an_unknown_launcher_is_named():
    with pytest.raises(ValueError, match="--launcher: expected one of pdsh, .*, got 'teleport'"):
        plan("--launcher", "teleport", "train.py")


def test_a_taken_port_that_was_asked_for_is_named_with_its_flag(taken_port):
    with pytest.raises(
        ValueError, match=f"--master_port: expected a free port, got {taken_port}, which is taken"
    ):
        plan("--master_port", str(taken_port), "train.py")


def test_a_free_port_is_picked_when_the_default_is_taken(taken_port, monkeypatch, caplog):
    monkeypatch.setattr(runner, "_DEFAULT_PORT", taken_port)
    job = plan("train.py")
    assert job.master_port not in (0, taken_port)
    assert f"port {taken_port} is taken: using {job.master_port}" in caplog.text


def test_ranks_share_the_cores_unless_the_user_said_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert plan("--num_gpus", "2", "train.py").environment()["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert "OMP_NUM_THREADS" not in plan("train.py").environment()
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in plan("--num_gpus", "2", "train.py").environment()


def test_ranks_find_deepspeeds_variables():
    environment = plan("--num_gpus", "3", "train.py").environment()
    assert [environment[name] for name in ("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")] == ["3", "0", "1"]


@pytest.mark.parametrize("words", [("--num_gpus", "0", "train.py"), ("--save_pid", "train.py")])
def test_a_wrong_command_line_prints_one_line_and_exits_with_2(words, capsys):
    with pytest.raises(SystemExit) as caught:
        runner.main(words)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_name_of_the_environment_file_is_deepspeeds():
    assert runner.DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"
