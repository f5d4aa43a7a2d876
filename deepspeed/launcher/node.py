"""What the launchers of several hosts start on each: this host's part of the job.

``python -m deepspeed.launcher.node --job=TEXT [--node_rank=N] [--end_with_stdin]``.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence

from deepspeed.launcher.job import HostsJob
from deepspeed.launcher.launch import run_job

__all__ = ["find_node_rank", "main"]

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_NODEID")


def main(args: Sequence[str] | None = None) -> None:
    """Run this host's ranks and exit with the job's exit code.

    Args:
        args: Words after the program's name; the process's own by default.
    """
    parser = argparse.ArgumentParser(prog="deepspeed.launcher.node")
    parser.add_argument("--job", required=True, help="what HostsJob.to_text wrote")
    parser.add_argument("--node_rank", type=int, default=None, help="number of this host; else it is found")
    parser.add_argument("--end_with_stdin", action="store_true", help="stop when standard input ends")
    options = parser.parse_args(args)
    job = HostsJob.from_text(options.job)
    if options.end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    node_rank = options.node_rank
    if node_rank is None:
        try:
            node_rank = find_node_rank(list(job.hosts), os.environ)
        except ValueError as error:
            print(f"deepspeed: {error}", file=sys.stderr)
            sys.exit(2)
    sys.exit(run_job(job.on_host(node_rank)))


def find_node_rank(hosts: Sequence[str], env: Mapping[str, str]) -> int:
    """Return the number of this host in the order of ranks.

    Args:
        hosts: All hosts.
        env: This process's environment. srun sorts hosts, so that its name counts first; mpirun keeps order.

    Raises:
        ValueError: Neither a name nor a launcher's variable says it.
    """
    slurm_name = env.get("SLURMD_NODENAME", "")
    if slurm_name in hosts:
        return hosts.index(slurm_name)
    for name in _RANK_VARIABLES:
        if env.get(name, "").isdigit() and int(env[name]) < len(hosts):
            return int(env[name])
    own = socket.gethostname()
    raise ValueError(
        f"--launcher: expected one of {', '.join(_RANK_VARIABLES)} to number the hosts {', '.join(hosts)}, "
        f"got none on {own}. Start one process a host, or use --no_ssh --node_rank N."
    )


def _end_with_stdin() -> None:
    """Wait for the end of standard input: whoever started this host through ssh is gone."""
    while os.read(0, 1024):
        pass
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        os._exit(128 + signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
