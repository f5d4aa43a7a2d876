"""Hosts that know of each other's end: when one fails, all stop, with the exit code of the first."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from deepspeed.launcher.job import Job
from deepspeed.utils.logging import logger

__all__ = ["HostWatch", "stop_hosts"]

_POLL_S = 0.5
_SILENT_S = 60.0  # a host that gives no sign for so long is dead
_LEAVE_S = 10.0  # how long host 0 keeps the store for the others to read the verdict
_VERDICT = "exit_code"
_MEET_S = 900.0  # how long hosts wait for host 0


class HostWatch:
    """One host's part in the watch over a job of several.

    Goal: a dead rank, launcher or machine ends the job everywhere, soon, with one exit code.
    Pattern: all hosts share the store of host 0, at the address where the ranks meet. The first failure
    writes the verdict there; a thread on each host reads it and stops that host's ranks. Each thread counts
    up a number of its own; host 0 takes one that stands still for dead, and a store that is gone is host 0's
    death.
    Lifetime: from before the ranks start until `leave`.

    Args:
        job: the job of this host.
        silent_s: how long a host may give no sign.

    Raises:
        DistNetworkError: no host 0 at the address in time; on host 0, the port is taken.
    """

    def __init__(self, job: Job, silent_s: float = _SILENT_S) -> None:
        self._job = job
        self._silent_s = silent_s
        self._over = threading.Event()
        self.verdict: int | None = None  # exit code that this job ends with because of a failure
        # On host 0 a server, which the agent shares; the others wait for it.
        self._store = _connect(job.master_addr, job.master_port, _MEET_S, is_server=job.node_rank == 0)
        self._thread = threading.Thread(target=self._run, name="host watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def report(self, exit_code: int) -> int:
        """Tell all hosts of a failure on this one.

        Returns:
            The exit code of the job's first failure: this one, unless another host was first.
        """
        if self.verdict is None:
            try:
                first = self._store.compare_set(_VERDICT, "", str(exit_code))
                self.verdict = int(first)
            except (dist.DistError, RuntimeError):
                self.verdict = exit_code
        return self.verdict if self.verdict is not None else exit_code

    def leave(self) -> None:
        """End the watch of this host; after a failure host 0 stays until the others have heard of it."""
        self._over.set()
        if self._thread.ident is not None:
            # A thread that is inside the store when the interpreter ends aborts the whole process.
            self._thread.join(_LEAVE_S)
        if self.verdict is None:
            return
        deadline = time.monotonic() + _LEAVE_S
        try:
            gone = self._store.add("gone", 1)
            while self._job.node_rank == 0 and gone < self._job.num_nodes and time.monotonic() < deadline:
                time.sleep(_POLL_S / 5)
                gone = self._store.add("gone", 0)
        except (dist.DistError, RuntimeError):
            return

    def _run(self) -> None:
        try:
            seen: dict[int, tuple[int, float]] = {}
            while not self._over.wait(_POLL_S):
                self._store.add(f"sign/{self._job.node_rank}", 1)
                if self._job.node_rank == 0:
                    self._look_for_silent_hosts(seen)
                if self._store.check([_VERDICT]):
                    self._stop(int(self._store.get(_VERDICT)), "another host failed")
                    return
        except (dist.DistError, RuntimeError) as error:
            # An ordinary end closes the store too: then this host is about to leave.
            if not self._over.wait(_LEAVE_S):
                self._stop(1, f"host 0 at {self._job.master_addr} is gone ({type(error).__name__})")

    def _look_for_silent_hosts(self, seen: dict[int, tuple[int, float]]) -> None:
        now = time.monotonic()
        for host in range(1, self._job.num_nodes):
            signs = self._store.add(f"sign/{host}", 0)
            if signs != seen.get(host, (None, 0.0))[0]:
                seen[host] = (signs, now)
            elif signs > 0 and now - seen[host][1] > self._silent_s:
                logger.error("host %d gives no sign for %g s", host, self._silent_s)
                self.report(1)
                return

    def _stop(self, exit_code: int, why: str) -> None:
        """End this host's ranks, by the signal that the agent hands on; before it is ready, the process."""
        self.verdict = exit_code
        logger.error("%s: stopping the ranks of this host, exit code %d", why, exit_code)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            os._exit(exit_code)
        os.kill(os.getpid(), signal.SIGTERM)


def stop_hosts(addr: str, port: int, exit_code: int, limit_s: float) -> None:
    """Stop a job from outside: write the verdict for all its hosts.

    Args:
        addr: Where its ranks meet.
        port: The same.
        exit_code: What the hosts' launchers return.
        limit_s: How long to try; a job that has not begun has no store.
    """
    try:
        _connect(addr, port, limit_s).compare_set(_VERDICT, "", str(exit_code))
    except (dist.DistError, RuntimeError):
        logger.debug("no store at %s:%d: the job has not begun, or has ended", addr, port)


def _connect(addr: str, port: int, limit_s: float, is_server: bool = False) -> dist.Store:
    if not is_server:
        _wait_for_server(addr, port, limit_s)
    store = dist.TCPStore(
        addr,
        port,
        is_master=is_server,
        wait_for_workers=False,
        multi_tenant=is_server,
        timeout=timedelta(seconds=limit_s),
    )
    return dist.PrefixStore("deepspeed_hosts", store)


def _wait_for_server(addr: str, port: int, limit_s: float) -> None:
    """Return when something listens: the store's own client writes a page of warnings for each refusal."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((addr, port), timeout=max(1.0, limit_s)).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise dist.DistNetworkError(f"no answer within {limit_s:g} s ({error})") from None
            time.sleep(_POLL_S)
