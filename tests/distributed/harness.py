"""Runs a function on N ranks, each its own process, with a time limit: gloo on the CPU, NCCL on GPUs.

Ranks are forked from a server process that imported torch once and has no threads and no process group, so a
world of 3 starts in tenths of a second. The parent holds the rendezvous store: no port is picked before it is
bound.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_GRACE_S = (
    10.0  # for the other ranks, once one has failed: long enough to raise by themselves, short if they hang
)
_START_S = 60.0  # for imports and the process group, on a busy machine; the caller's limit counts from then
_LOG_TAIL_CHARS = 4000


class _State(IntEnum):
    STARTING = 0
    READY = 1  # enters the function
    DONE = 2


@dataclass
class _Rank:
    """One rank as the parent sees it."""

    index: int
    process: Any
    pipe: Connection
    log: Path
    result: Any = None
    error: str | None = None
    state: _State = _State.STARTING

    def describe(self) -> str:
        log = self.log.read_text(errors="replace")[-_LOG_TAIL_CHARS:] if self.log.exists() else ""
        return f"--- rank {self.index}: {self.error}\n{log}"


@dataclass(frozen=True)
class _Job:
    """What a rank needs to know."""

    rank: int
    world: int
    port: int
    log: str
    timeout_s: float
    env: dict[str, str] = field(default_factory=dict)
    process_group: bool = True
    device: str = "cpu"


def run_distributed(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    env: dict[str, str] | None = None,
    process_group: bool = True,
    device: str = "cpu",
) -> list[Any]:
    """Call fn(*args) on every rank of a world and return what each rank returned, in rank order.

    Args:
        world: Number of ranks.
        fn: A function at the top level of an importable module. It reads its rank from torch.distributed.
        args: Picklable arguments, the same on every rank.
        timeout_s: Every rank is killed this many seconds after it entered fn, and the failure shows where it
            stood.
        env: Extra environment of the ranks.
        process_group: Whether the ranks enter fn with a process group; without, RANK and the like are set all
            the same.
        device: "cpu" for gloo, or "cuda": each rank has the GPU of its number, and NCCL. "cuda:0": NCCL as
            well, and the first GPU for all of them.

    Raises:
        AssertionError: A rank failed, died or hung; the message holds the traceback and the log of every such
            rank.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        jobs = [
            _Job(rank, world, store.port, f"{folder}/{rank}.log", timeout_s, env or {}, process_group, device)
            for rank in range(world)
        ]
        ranks = [_start(job, fn, args) for job in jobs]
        try:
            _collect(ranks, timeout_s)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()
                rank.pipe.close()
        failed = [rank for rank in ranks if rank.error is not None]
        if failed:
            names = ", ".join(str(rank.index) for rank in failed)
            raise AssertionError(
                f"{fn.__name__}: ranks {names} of {world} failed\n"
                + "\n".join(rank.describe() for rank in failed)
            )
    return [rank.result for rank in ranks]


def share_one_gpu(rank: int) -> dict[str, str]:
    """Environment of a rank that shares the first GPU with the others.

    NCCL refuses two ranks of one host on one GPU, so each has a host of its own, as far as NCCL can see, and
    they talk through sockets.
    """
    return {
        "CUDA_VISIBLE_DEVICES": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NCCL_HOSTID": f"rank {rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cuda",
    }


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "tests.distributed.preload"])
    return context


def _start(job: _Job, fn: Callable[..., Any], args: tuple[Any, ...]) -> _Rank:
    context = _context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(job, theirs, fn, args), daemon=True)
    process.start()
    theirs.close()
    return _Rank(job.rank, process, ours, Path(job.log))


def _collect(ranks: list[_Rank], timeout_s: float) -> None:
    """Wait until every rank has entered the function, then until every rank is done."""
    for awaited, limit_s in ((_State.READY, _START_S), (_State.DONE, timeout_s)):
        deadline = time.monotonic() + limit_s
        while late := [rank for rank in ranks if rank.state < awaited]:
            heard = wait([rank.pipe for rank in late], max(0.0, deadline - time.monotonic()))
            if not heard:
                for rank in late:
                    rank.error = f"did not {'finish' if awaited is _State.DONE else 'start'} in time"
                return
            for rank in late:
                if rank.pipe in heard:
                    _receive(rank)
                    if rank.error is not None:
                        deadline = min(deadline, time.monotonic() + _GRACE_S)


def _receive(rank: _Rank) -> None:
    try:
        rank.state, rank.result, rank.error = pickle.loads(rank.pipe.recv_bytes())
    except EOFError:
        rank.process.join()
        rank.state, rank.error = _State.DONE, f"died with exit code {rank.process.exitcode}"


def _rank_main(job: _Job, pipe: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Runs in the rank's process."""
    log = os.open(job.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.dump_traceback_later(_START_S - 2.0, file=sys.stderr)
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world),
        LOCAL_WORLD_SIZE=str(job.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        DS_ACCELERATOR=job.device,
    )
    if job.device == "cuda:0":
        os.environ.update(share_one_gpu(job.rank))
    os.environ.update(job.env)
    torch.set_num_threads(1)
    try:
        if job.device != "cpu":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if job.process_group:
            dist.init_process_group("gloo" if job.device == "cpu" else "nccl")
        pipe.send_bytes(pickle.dumps((_State.READY, None, None)))
        faulthandler.dump_traceback_later(max(1.0, job.timeout_s - 2.0), file=sys.stderr)
        result, error = fn(*args), None
    except BaseException:
        result, error = None, traceback.format_exc()
    # Not pipe.send: it shares a tensor's storage through this process, which ends.
    pipe.send_bytes(pickle.dumps((_State.DONE, result, error)))
    if error is None and dist.is_initialized():
        dist.barrier()  # nobody leaves while another rank still talks to it
    os._exit(0 if error is None else 1)
