"""Starts the ranks of a job as processes of their own and collects what each prints last."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def run_ranks(module, arguments, world, limit_s):
    """Run `python -m module arguments` on `world` gloo ranks; returns each rank's last line.

    A rank that fails is an AssertionError with its output; none outlives the call.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = str(Path(__file__).parents[2])
    shared = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": root,
    }
    command = [sys.executable, "-m", module, *arguments]
    ranks = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=limit_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, err) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, (out + err).decode()
    return [out.decode().splitlines()[-1] for out, _ in outputs]
