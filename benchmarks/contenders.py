"""Whose engine is measured: this package, and stock DeepSpeed when it is named.

Each runs in a process of its own.
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


class Contender(NamedTuple):
    """A name, the interpreter that runs it, and where that finds `deepspeed` (None: installed there)."""

    name: str
    interpreter: str
    python_path: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name stock DeepSpeed and the device."""
    parser.add_argument("--stock-python", help="interpreter of an environment that has stock DeepSpeed")
    parser.add_argument("--stock-path", help="folder that holds stock's `deepspeed` package, for PYTHONPATH")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default=None, help="default: cuda where there is one"
    )


def choose(options: argparse.Namespace) -> list[Contender]:
    """Returns ours, and stock if the options name it."""
    contenders = [Contender("ours", sys.executable, str(HERE.parent))]
    if options.stock_python or options.stock_path:
        contenders.append(Contender("stock", options.stock_python or sys.executable, options.stock_path))
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
    """

    def __init__(self, contender: Contender, script: str, arguments: Sequence[str], device: str) -> None:
        self._port = _free_port()
        self._process = subprocess.Popen(
            [contender.interpreter, str(HERE / script), *arguments, "--device", device],
            env=_environment(contender, device, self._port),
            cwd=HERE,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, command: str) -> Any:
        """Returns the answer to a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Returns the next answer; what else the process prints is skipped, since stock logs there too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line[len("answer ") :])
        raise RuntimeError(f"{self._process.args}: expected an answer, got the end. Its error stands above.")

    def close(self) -> None:
        """Ends the process, and removes the shared memory that stock leaves behind on CPU."""
        self._process.communicate()
        for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_127.0.0.1_{self._port}_*"):
            leftover.unlink()


def _environment(contender: Contender, device: str, port: int) -> Mapping[str, str]:
    """A world of one rank, with the contender's package first."""
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    environment.pop("PYTHONPATH", None)
    if contender.python_path:
        environment["PYTHONPATH"] = contender.python_path
    if device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
