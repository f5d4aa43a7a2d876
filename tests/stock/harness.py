"""Runs programs in the interpreter with stock and the patch, on one or several CPU ranks.

A program is a snippet or the path of a job file. What it hands to `report` comes back; several ranks end with
`leave` (a snippet has both names; a job file imports them from `reporting`). On the path of every program are
`tests/stock/jobs` and `tests/compat`, whose `peer_job` trains and exchanges checkpoints, and never this
repository's `deepspeed`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.stock_python import COMPILER, OPS, STOCK

LIMIT_S = 600  # the first that needs them compiles stock's ops
MARKS = [
    pytest.mark.stock,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(STOCK is None, reason="set DS_STOCK_PYTHON: run make test-stock"),
]
JOBS = Path(__file__).parent / "jobs"
# For jobs that measure memory: whether the C heap keeps what is freed in it depends on what lies above.
LARGE_IS_MAPPED = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
_PATH = (JOBS, Path(__file__).parents[1] / "compat")
_GRACE_S = 10.0  # for the other ranks to end by themselves when one has failed
_RESULT = "RESULT "
_SNIPPET_START = "from reporting import leave, report\n"


class Ended(NamedTuple):
    """How one rank ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def result(self) -> Any:
        """What the program reported last."""
        lines = [line for line in self.stdout.splitlines() if line.startswith(_RESULT)]
        assert lines, f"no result:\n{self.stdout[-4000:]}\n{self.stderr[-4000:]}"
        return json.loads(lines[-1].removeprefix(_RESULT))


def results(program: str | Path, *arguments: str, **settings: Any) -> list[Any]:
    """What each rank of a program reported; all must have ended well. Takes what `run` takes."""
    ranks = run(program, *arguments, **settings)
    # A rank that was killed because another had failed is not the one to look at first.
    bad = sorted(((ended, rank) for rank, ended in enumerate(ranks) if ended.code), reverse=True)
    assert not bad, "\n".join(f"rank {rank} ended with {e.code}:\n{e.stderr[-4000:]}" for e, rank in bad)
    return [ended.result for ended in ranks]


def run(
    program: str | Path,
    *arguments: str,
    world: int = 1,
    environment: Mapping[str, str] | None = None,
    through: Sequence[str] = (),
    timeout_s: float = LIMIT_S,
) -> list[Ended]:
    """Run a program in stock's interpreter and wait for all its ranks; nothing of it is left afterwards.

    Args:
        program: a snippet, or the path of a file.
        arguments: for the file.
        world: number of ranks. Each finds torchrun's variables, also if it is the only one.
        environment: added to the ranks' own, for example DEEPSPEED_LEAN. Nothing of the patch is inherited.
        through: what stands between the interpreter and the file, for example ("-m", "deepspeed_lean").
        timeout_s: when all are killed, and the test fails.
    """
    if isinstance(program, Path):
        command = [*through, str(program), *arguments]
    else:
        command = ["-c", _SNIPPET_START + textwrap.dedent(program)]
    with tempfile.TemporaryDirectory(prefix="stock-") as folder, socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        shared = {**_environment(world, port), **(environment or {})}
        with _started([str(STOCK), *command], world, shared, Path(folder), port) as processes:
            in_time = _wait(processes, time.monotonic() + timeout_s)
        ended = [
            Ended(process.returncode, *(_output(folder, rank, kind).read_text() for kind in ("out", "err")))
            for rank, process in enumerate(processes)
        ]
    assert in_time, f"not done after {timeout_s} s:\n" + "\n".join(e.stderr[-2000:] for e in ended)
    return ended


def _environment(world: int, port: int) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("DEEPSPEED_LEAN")}
    return own | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, _PATH)),
        "TORCH_EXTENSIONS_DIR": str(OPS),
        "CXX": str(COMPILER),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "LOCAL_SIZE": str(world),  # what stock reads
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@contextlib.contextmanager
def _started(
    command: list[str], world: int, shared: dict[str, str], folder: Path, port: int
) -> Iterator[list[subprocess.Popen]]:
    """The ranks' processes, each the head of a group of its own; the groups are gone at the end."""
    processes: list[subprocess.Popen] = []
    try:
        for rank in range(world):
            with (
                open(_output(folder, rank, "out"), "w") as out,
                open(_output(folder, rank, "err"), "w") as err,
            ):
                processes.append(
                    subprocess.Popen(
                        command,
                        env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        cwd=folder,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            # The forked workers of a rank that ended are in its group, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # Stock's shared memory op never removes its buffers.
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}*"):
            left.unlink(missing_ok=True)


def _wait(processes: list[subprocess.Popen], deadline: float) -> bool:
    """Returns whether all ended in time; when one has failed, the others have little left."""
    failed_before = False
    while any(process.poll() is None for process in processes):
        failed = any(process.poll() not in (None, 0) for process in processes)
        if failed and not failed_before:
            failed_before, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            return failed
        time.sleep(0.02)
    return True


def _output(folder: str | Path, rank: int, kind: str) -> Path:
    return Path(folder) / f"{rank}.{kind}"
