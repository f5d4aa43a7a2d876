"""Whose engine is measured: this package, and stock DeepSpeed when it is named, also with stock_patch.

Each runs in processes of its own, one a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
LEAVE_S = 60.0


class Contender(NamedTuple):
    """A name, the interpreter that runs it, and where that finds `deepspeed` (None: installed there)."""

    name: str
    interpreter: str
    python_path: str | None
    patched: bool = False  # stock with stock_patch


class Place(NamedTuple):
    """One rank of a job on this host."""

    rank: int
    world: int
    port: int  # of rank 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name stock DeepSpeed, the device and the number of ranks."""
    parser.add_argument("--stock-python", help="interpreter of an environment that has stock DeepSpeed")
    parser.add_argument("--stock-path", help="folder that holds stock's `deepspeed` package, for PYTHONPATH")
    parser.add_argument("--patch", action="store_true", help="stock with this repository's stock_patch, too")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default=None, help="default: cuda where there is one"
    )
    parser.add_argument("--world", type=int, default=1, help="ranks of each job, on this host")


def choose(options: argparse.Namespace) -> list[Contender]:
    """Returns ours, and stock if the options name it."""
    contenders = [Contender("ours", sys.executable, str(HERE.parent))]
    if options.stock_python or options.stock_path:
        stock = Contender("stock", options.stock_python or sys.executable, options.stock_path)
        contenders.append(stock)
        if options.patch:
            folders = filter(None, (options.stock_path, str(HERE.parent / "stock_patch")))
            path = os.pathsep.join(folders)
            contenders.append(stock._replace(name="stock, patched", python_path=path, patched=True))
    return contenders


def choose_device(options: argparse.Namespace) -> str:
    """Returns the device that the options name, else cuda where there is one."""
    if options.device is None:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return options.device


class Worker:
    """A contender's process. It is told what to do a line at a time, and answers in lines of JSON.

    Args:
        contender: who.
        script: file in this folder to run.
        arguments: its command line.
        device: cpu or cuda.
        place: which rank it is.
    """

    def __init__(
        self, contender: Contender, script: str, arguments: Sequence[str], device: str, place: Place
    ) -> None:
        self._process = subprocess.Popen(
            [contender.interpreter, str(HERE / script), *arguments, "--device", device],
            env=_environment(contender, device, place),
            cwd=HERE,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def tell(self, command: str) -> None:
        """Sends a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Returns the next answer; what else the process prints is skipped, since stock logs there too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line[len("answer ") :])
        raise RuntimeError(f"{self._process.args}: expected an answer, got the end. Its error stands above.")

    def end_input(self) -> None:
        """Lets it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        """Ends it whatever it waits for."""
        self._process.kill()

    def wait(self) -> None:
        """Waits for its end, but not for ever: threads of a library may hold a process that is done."""
        assert self._process.stdout is not None
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Job:
    """The ranks of one contender. All are told at once, and answer in rank order.

    Args: those of `Worker`, and the number of ranks.
    """

    def __init__(
        self, contender: Contender, script: str, arguments: Sequence[str], device: str, world: int
    ) -> None:
        self._port = _free_port()
        places = [Place(rank, world, self._port) for rank in range(world)]
        self._ranks = [Worker(contender, script, arguments, device, place) for place in places]

    def ask(self, command: str) -> list[Any]:
        """Returns each rank's answer to a command."""
        for rank in self._ranks:
            rank.tell(command)
        return self.answer()

    def answer(self) -> list[Any]:
        """Returns each rank's next answer; if one has none, ends those that would wait for it for ever."""
        try:
            return [rank.answer() for rank in self._ranks]
        except RuntimeError:
            for rank in self._ranks:
                rank.kill()
            self.close()
            raise

    def close(self) -> None:
        """Ends the processes, and removes the shared memory that stock leaves behind on CPU."""
        for rank in self._ranks:
            rank.end_input()
        for rank in self._ranks:
            rank.wait()
        for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_127.0.0.1_{self._port}_*"):
            leftover.unlink()


def _environment(contender: Contender, device: str, place: Place) -> Mapping[str, str]:
    """A rank's place, and the contender's package first. Ranks share the cores, stock's too."""
    rank, world, port = map(str, place)
    environment = {**os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    environment.update(LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if place.world > 1:
        share = max(1, len(os.sched_getaffinity(0)) // place.world)
        environment.update(OMP_NUM_THREADS=str(share), DS_HOST_THREADS=str(share))
    environment.pop("PYTHONPATH", None)
    if contender.python_path:
        environment["PYTHONPATH"] = contender.python_path
    if contender.patched:
        environment["DEEPSPEED_LEAN"] = "1"
    if device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    elif share_gpu(device, place.world):
        # NCCL refuses two ranks of one host on one GPU: let each have a host of its own, and sockets between.
        environment.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", CUDA_VISIBLE_DEVICES="0")
        environment.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo")
    return environment


def share_gpu(device: str, world: int) -> bool:
    """Returns whether there are fewer GPUs than ranks, so that all have to share the first."""
    if device != "cuda":
        return False
    import torch

    return torch.cuda.device_count() < world


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
