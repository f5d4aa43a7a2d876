"""A job on two hosts, which are two loopback addresses of this machine, runs and ends as one."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed.launcher.job import Job
from deepspeed.launcher.watch import HostWatch
from tests.unit.source_tree import ROOT

COMMAND = [sys.executable, "-c", "from deepspeed.launcher.runner import main; main()"]
LIMIT_S = 100
TRAIN = """
import json, os, sys
import torch, deepspeed
model = torch.nn.Linear(4, 1, bias=False)
torch.nn.init.zeros_(model.weight)
config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "bf16": {"enabled": True},
          "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
          "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
engine = deepspeed.initialize(model=model, config=config)[0]
rank = deepspeed.comm.get_rank()
engine.backward(engine(torch.full((1, 4), float(rank + 1), dtype=torch.bfloat16)).sum())
engine.step()
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR".split()
seen = {name: os.environ[name] for name in names}
seen.update(weights=model.weight.flatten().tolist(), argv=sys.argv[1:], extra=os.environ.get("EXTRA"),
            host=os.environ.get("STAND_IN_HOST"), port=os.environ["MASTER_PORT"])
open(f"out/{rank}", "w").write(json.dumps(seen))
"""
# Rank 1 fails; rank 0 would sleep on, and would not find out by itself.
FAIL = """
import os, sys, time
rank = os.environ["RANK"]
open(f"out/{rank}", "w").write(str(os.getpid()))
while len(os.listdir("out")) < 2:
    time.sleep(0.01)
if rank == os.environ.get("FAILS", "1"):
    sys.exit(7)
time.sleep(600)
"""
# Stands for ssh: takes its options, and runs the command in a shell of this machine.
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do case "$1" in -o | -p) shift 2 ;; *) shift ;; esac; done
STAND_IN_HOST=$1
export STAND_IN_HOST
shift
[ "$*" = "hostname -I" ] && echo 127.0.0.1 10.9.9.9 && exit 0
[ "$STAND_IN_HOST" = 127.0.0.2 ] && [ -e unreachable ] && exit 255
exec /bin/sh -c "$*"
"""
# Stands for pdsh: the words before the last are options, the hosts come after -w.
PDSH = """#!/bin/sh
while [ $# -gt 1 ]; do [ "$1" = -w ] && hosts=$2; shift; done
line=$1 number=0 code=0 started=
exec 3<&0
for host in $(echo $hosts | tr , ' '); do
    ssh $host "$(echo "$line" | sed "s/%n/$number/; s/%%/%/g")" <&3 &
    started="$started $!" number=$((number + 1))
done
for one in $started; do wait $one; got=$?; [ $got -gt $code ] && code=$got; done
exit $code
"""
# Stands for mpirun: runs the words from the interpreter on, once a host.
MPIRUN = """#!/bin/sh
while [ "${1#*python}" = "$1" ]; do [ "$1" = -genv ] && export "$2=$3"; shift; done
OMPI_COMM_WORLD_RANK=0 "$@" & first=$!
OMPI_COMM_WORLD_RANK=1 "$@" & second=$!
wait $first; code=$?
wait $second || code=$?
exit $code
"""
STAND_INS = {"ssh": SSH, "pdsh": PDSH, "mpirun": MPIRUN}


@pytest.fixture(autouse=True)
def two_hosts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    (tmp_path / "out").mkdir()
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    Path("hostfile").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    Path(".deepspeed_env").write_text("EXTRA=50% 'of' $it\n")


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start(*words):
    return subprocess.Popen(
        [*COMMAND, "--hostfile", "hostfile", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end_of(*jobs):
    """Exit codes of jobs and their output; none outlives the call."""
    try:
        outputs = [job.communicate(timeout=LIMIT_S)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [job.returncode for job in jobs], "\n".join(outputs)


def write(text):
    Path("script.py").write_text(text)
    return "script.py"


def reports():
    return [json.loads(Path("out", name).read_text()) for name in sorted(os.listdir("out"))]


def assert_trained_together(port):
    ranks = reports()
    assert len(ranks) == 2
    for number, rank in enumerate(ranks):
        # The gradient is the mean of 1 and 2: both ranks' samples are in it.
        assert rank["weights"] == [-1.5] * 4
        assert (rank["RANK"], rank["WORLD_SIZE"], rank["CROSS_RANK"]) == (str(number), "2", str(number))
        assert rank["LOCAL_RANK"] == "0"
        assert rank["LOCAL_SIZE"] == rank["LOCAL_WORLD_SIZE"] == "1"
        assert (rank["CROSS_SIZE"], rank["MASTER_ADDR"]) == ("2", "127.0.0.1")
        assert rank["argv"] == ["--local_rank=0", "--text", "100% 'x y'"]
        assert rank["port"] == port


def wait_for(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids():
    wait_for(lambda: len(os.listdir("out")) == 2 and all(Path("out", name).read_text() for name in "01"))
    return [int(Path("out", name).read_text()) for name in "01"]


def test_two_hosts_that_start_themselves_train_together(port):
    script = write(TRAIN)
    words = ("--no_ssh", "--master_addr", "127.0.0.1", "--master_port", port)
    jobs = [start(*words, "--node_rank", rank, script, "--text", "100% 'x y'") for rank in "10"]
    codes, output = end_of(*jobs)
    assert codes == [0, 0], output
    assert_trained_together(port)


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi"])
def test_two_hosts_that_a_launcher_starts_train_together(launcher, port):
    job = start("--launcher", launcher, "--master_port", port, write(TRAIN), "--text", "100% 'x y'")
    codes, output = end_of(job)
    assert codes == [0], output
    assert_trained_together(port)
    if launcher == "pdsh":  # and through it the stand-in for ssh
        assert [rank["host"] for rank in reports()] == ["127.0.0.1", "127.0.0.2"]
        assert {rank["extra"] for rank in reports()} == {"50% 'of' $it"}


def test_a_failing_rank_ends_all_hosts_with_its_exit_code(port, monkeypatch):
    monkeypatch.setenv("FAILS", "0")  # the host that holds the store
    script = write(FAIL)
    words = ("--no_ssh", "--master_port", port)
    codes, output = end_of(*[start(*words, "--node_rank", rank, script) for rank in "01"])
    assert codes == [7, 7], output
    assert not any(map(is_running, pids()))


def test_a_launcher_returns_the_exit_code_of_the_first_failure(port):
    codes, output = end_of(start("--launcher", "ssh", "--master_port", port, write(FAIL)))
    assert codes == [7], output
    assert not any(map(is_running, pids()))


def test_a_host_out_of_reach_ends_those_that_wait_for_it(port):
    Path("unreachable").touch()
    codes, output = end_of(start("--launcher", "ssh", "--master_port", port, write(FAIL)))
    assert codes == [255], output
    assert os.listdir("out") == []


def test_stopping_the_command_stops_all_hosts(port):
    script = write(FAIL.replace("sys.exit(7)", "pass"))
    job = start("--launcher", "openmpi", "--master_port", port, script)
    started = pids()
    job.send_signal(signal.SIGTERM)
    codes, output = end_of(job)
    assert codes == [128 + signal.SIGTERM], output
    assert not any(map(is_running, started))


def test_hosts_end_when_the_command_that_started_them_is_killed(port):
    job = start("--launcher", "ssh", "--master_port", port, write(FAIL.replace("sys.exit(7)", "pass")))
    started = pids()
    job.kill()
    job.communicate(timeout=LIMIT_S)
    wait_for(lambda: not any(map(is_running, started)))


def test_a_host_that_gives_no_sign_is_taken_for_dead(port, monkeypatch):
    stopped = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    job = Job(("python",), (), 1, "127.0.0.1", int(port), num_nodes=2)
    first, second = HostWatch(job, silent_s=1.0), HostWatch(replace(job, node_rank=1))
    try:
        first.start()
        second.start()
        wait_for(lambda: first._store.add("sign/1", 0) > 0)
        second._over.set()  # as a machine that is cut off
        wait_for(lambda: first.verdict is not None)
        assert stopped.wait(10)
        assert (first.verdict, second.report(7)) == (1, 1), "the first failure is everybody's"
    finally:
        second.leave()
        first.leave()
        signal.signal(signal.SIGTERM, before)


def test_leaving_waits_for_a_thread_that_is_inside_the_store(port, monkeypatch):
    """A thread in native code when the interpreter ends aborts the process: exit code 134 of a good job."""
    watch = HostWatch(Job(("python",), (), 1, "127.0.0.1", int(port), num_nodes=1))
    inside = threading.Event()

    def slow_add(key, amount):
        inside.set()
        time.sleep(1.0)
        return amount

    monkeypatch.setattr(watch, "_store", SimpleNamespace(add=slow_add, check=lambda keys: False))
    watch.start()
    assert inside.wait(10)
    watch.leave()
    assert not watch._thread.is_alive()
