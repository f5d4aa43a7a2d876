"""Running a job on several hosts through one of the launchers, to its end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from deepspeed.launcher.multinode import LAUNCHERS, Launch, build_commands
from deepspeed.launcher.watch import stop_hosts
from deepspeed.utils.logging import logger

__all__ = ["check_program", "first_address", "run_hosts"]

_POLL_S = 0.1
_STOP_S = 10.0  # how long to look for the job's store
_GRACE_S = 45.0  # the agent gives ranks 30 s to end
_SSH_S = 30.0
_LEAVE_S = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def check_program(launcher: str) -> None:
    """Make sure that a launcher is installed.

    Raises:
        ValueError: It is not.
    """
    program = LAUNCHERS[launcher].program
    if shutil.which(program) is None:
        raise ValueError(
            f"--launcher: expected {program} on PATH for {launcher}, got none. Install it, choose another of "
            f"{', '.join(LAUNCHERS)}, or start the command on each host with --no_ssh --node_rank N."
        )


def first_address(host: str, ssh_port: int | None) -> str:
    """Ask a host for its address, which also shows that ssh asks for no password.

    Args:
        host: Name as in the hostfile.
        ssh_port: None for ssh's own choice.

    Raises:
        ValueError: ssh cannot reach it.

    Source: the first word of ``hostname -I``, as DeepSpeed takes it.
    """
    port = ["-p", str(ssh_port)] if ssh_port else []
    command = ["ssh", "-o", "BatchMode=yes", *port, host, "hostname -I"]
    try:
        asked = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SSH_S, check=False
        )
        words, why = asked.stdout.split(), asked.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        words, why = [], str(error)
    if not words:
        raise ValueError(
            f"--master_addr: expected {host} to answer {' '.join(command)!r} without a password, got "
            f"{why or 'nothing'!r}. Set up ssh keys, or pass --master_addr and --no_ssh_check."
        )
    return words[0]


def run_hosts(launcher: str, launch: Launch) -> int:
    """Start a job on all hosts and wait for its end.

    Args:
        launcher: Name in ``LAUNCHERS``.
        launch: Job and hosts.

    Returns:
        0, or the exit code of the first failure; 128 + N after signal N.

    Raises:
        ValueError: A flag that this launcher has no use for.
    """
    commands, own = build_commands(launcher, launch)
    logger.info("%s: starting %d hosts: %s", launcher, len(launch.hosts), ", ".join(launch.hosts))
    # Standard input stays open, and ends with this process: hosts started through ssh end with it.
    running = [
        subprocess.Popen(command, env={**os.environ, **own}, stdin=subprocess.PIPE, start_new_session=True)
        for command in commands
    ]
    caught: list[int] = []
    with _signals_into(caught):
        code = _wait(running, caught)
    if code:
        _stop(running, launch, code)
    return code


def _wait(running: Sequence[subprocess.Popen[Any]], caught: Sequence[int]) -> int:
    """Wait for the first failure, the first signal, or the end of all."""
    while True:
        if caught:
            return 128 + caught[0]
        codes = [process.poll() for process in running]
        failed = [code for code in codes if code]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        time.sleep(_POLL_S)


def _stop(running: Sequence[subprocess.Popen[Any]], launch: Launch, code: int) -> None:
    """End what still runs: by the job's store, then by its launchers' end."""
    all_ended = _ended(running, _LEAVE_S)  # after a failure of their own the hosts end by themselves
    # A launcher that has ended may have left hosts behind that wait for one that never came.
    stop_hosts(launch.job.master_addr, launch.job.master_port, code, 1.0 if all_ended else _STOP_S)
    _ended(running, _LEAVE_S)
    for process in running:
        if process.stdin is not None:
            process.stdin.close()
    if not _ended(running, _GRACE_S):
        for process in running:
            process.kill()


def _ended(running: Sequence[subprocess.Popen[Any]], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while any(process.poll() is None for process in running):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


@contextmanager
def _signals_into(caught: list[int]) -> Iterator[None]:
    """Note the signals that ask this process to end, instead of ending at once."""

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {
        number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
