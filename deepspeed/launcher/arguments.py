"""The command line of ``deepspeed``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

__all__ = ["build_parser", "parse_args"]

_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser. Source: flags of the ``deepspeed`` command, DeepSpeed 0.19.8."""
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        description="Runs a training script once per device of one host or of several, under "
        "torch.distributed. A host without accelerators runs 1 process unless --num_gpus says more.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_devices(parser)
    _add_rendezvous(parser)
    _add_script_handling(parser)
    _add_multi_node(parser)
    parser.add_argument("user_script", help="script, module or program to run")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line.

    Args:
        args: Words after the program's name; the process's own by default.
    """
    return build_parser().parse_args(args)


def _add_devices(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("devices").add_argument
    add(
        "-H",
        "--hostfile",
        default="/job/hostfile",
        help="lines 'host slots=N'; a missing file or None means this machine",
    )
    add(
        "-i",
        "--include",
        default="",
        help="devices to use: HOST[:SLOT,...][@HOST...], for example localhost:0,2",
    )
    add("-e", "--exclude", default="", help="devices to leave out, in the same form")
    add("--num_nodes", type=int, default=-1, help="first N hosts of the hostfile; -1 for all")
    add(
        "--num_gpus",
        "--num_accelerators",
        type=int,
        default=-1,
        help="devices to use, or processes without devices",
    )
    add("--bind_cores_to_rank", action="store_true", help="refused: use taskset or numactl")
    add("--bind_core_list", default=None, help="refused: use taskset or numactl")


def _add_rendezvous(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("rendezvous").add_argument
    add("--master_addr", default="", help="address of rank 0; when empty, what the first host says")
    add(
        "--master_port",
        type=int,
        default=None,
        help="port of rank 0; 29500, on one host a free one if that is taken",
    )
    add("--node_rank", type=int, default=-1, help="number of this host, with --no_ssh")


def _add_script_handling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("script").add_argument
    add("--module", action="store_true", help="run it as python -m does")
    add("--no_python", action="store_true", help="it is a program, not a Python script")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank=N to it")
    add(
        "--enable_each_rank_log",
        default="None",
        metavar="DIR",
        help="write each rank's output to a file in DIR",
    )
    add("--log_level", choices=_LOG_LEVELS, default="info", help="of the launcher")
    add("-q", "--quiet", action="store_true", help="the same as --log_level error")


def _add_multi_node(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("several hosts").add_argument
    add(
        "--launcher",
        default="pdsh",
        help="what starts the hosts: pdsh, ssh, openmpi, mpich, mvapich, impi or slurm",
    )
    add("--launcher_args", default="", help="arguments for it, as one word")
    add("--no_ssh", action="store_true", help="this command is run on every host, with --node_rank")
    add("--no_ssh_check", action="store_true", help="do not ask the first host for its address through ssh")
    add("--ssh_port", type=int, default=None, help="port of ssh")
    add("--venv_script", default=None, help="script that every host sources first")
    add("--force_multi", action="store_true", help="use the launcher for one host too, which may be another")
    add("--save_pid", action="store_true", help="refused: the launcher's own process id serves")
    add("--autotuning", choices=("tune", "run"), default="", help="refused")
