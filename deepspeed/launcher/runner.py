"""Entry point of the ``deepspeed`` command."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.launcher import devices
from deepspeed.launcher.arguments import parse_args
from deepspeed.launcher.environment import ENVIRONMENT_NAME, exported_environment
from deepspeed.launcher.job import HostsJob
from deepspeed.launcher.launch import run_job
from deepspeed.launcher.multinode import LAUNCHERS, Launch
from deepspeed.launcher.resources import Resources, choose_resources, parse_hostfile
from deepspeed.launcher.run_hosts import check_program, first_address, run_hosts
from deepspeed.utils.logging import logger, set_log_level_from_string

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "main"]

DEEPSPEED_ENVIRONMENT_NAME = ENVIRONMENT_NAME

_DEFAULT_PORT = 29500
_LOOPBACK = "127.0.0.1"


def main(args: Sequence[str] | None = None) -> None:
    """Run a job as the command line says and exit with its exit code: 0, or the first failing rank's.

    Args:
        args: Words after the program's name; the process's own by default.
    """
    options = parse_args(args)
    try:
        set_log_level_from_string("error" if options.quiet else options.log_level)
        job = plan_job(options)
        if _uses_launcher(options, job):
            sys.exit(run_hosts(options.launcher.lower(), plan_launch(options, job)))
    except (ValueError, NotImplementedError) as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run_job(job.on_host(max(0, options.node_rank))))


def plan_job(options: argparse.Namespace) -> HostsJob:
    """Return the job that a command line describes.

    Args:
        options: What ``parse_args`` returned.

    Raises:
        ValueError: Contradictory flags, an unknown device, a port that is taken, a host out of reach.
        NotImplementedError: Flags of features that are not here.
    """
    _check_flags(options)
    hosts = _resources(options)
    _check_node_rank(options, hosts)
    here = len(hosts) == 1 and not options.force_multi
    return HostsJob(
        hosts=hosts,
        program=_program(options),
        script_args=tuple(options.user_args),
        master_addr=_LOOPBACK if here and not options.master_addr else _address(options, hosts),
        master_port=_choose_port(options.master_port, here, options.node_rank == 0),
        log_dir=None if options.enable_each_rank_log == "None" else options.enable_each_rank_log,
        pass_local_rank=not options.no_local_rank,
    )


def plan_launch(options: argparse.Namespace, job: HostsJob) -> Launch:
    """Return how to start a job's hosts.

    Args:
        options: What ``parse_args`` returned.
        job: What ``plan_job`` returned.
    """
    here = Path.cwd()
    return Launch(
        job=job,
        exports=exported_environment(os.environ, [Path.home(), here]),
        cwd=str(here),
        extra_args=tuple(shlex.split(options.launcher_args)),
        ssh_port=options.ssh_port,
        venv_script=options.venv_script,
    )


def _uses_launcher(options: argparse.Namespace, job: HostsJob) -> bool:
    return (len(job.hosts) > 1 or options.force_multi) and not options.no_ssh


def _check_flags(options: argparse.Namespace) -> None:
    if options.launcher.lower() not in LAUNCHERS:
        raise ValueError(
            f"--launcher: expected one of {', '.join(LAUNCHERS)}, got {options.launcher!r}. Use one of them."
        )
    if options.module and options.no_python:
        raise ValueError("--module: expected no --no_python beside it, got both. A module needs Python.")
    for flag, instead in (
        ("bind_cores_to_rank", "Start the script under taskset or numactl."),
        ("bind_core_list", "Start the script under taskset or numactl."),
        ("save_pid", "Use the process id of this command."),
        ("autotuning", "Choose the batch size by hand."),
    ):
        if getattr(options, flag):
            raise NotImplementedError(
                f"--{flag}: expected it to be off, got it on; it is not here. {instead}"
            )


def _resources(options: argparse.Namespace) -> Resources:
    hosts = parse_hostfile(options.hostfile)
    if hosts is not None:
        pool = {host: list(range(count)) for host, count in hosts.items()}
        return choose_resources(pool, options.include, options.exclude, options.num_nodes, options.num_gpus)
    slots = devices.local_slots(options.num_gpus)
    if options.no_ssh and options.num_nodes > 1:
        pool = {f"node-{number}": slots for number in range(options.num_nodes)}
        return choose_resources(pool, options.include, options.exclude, options.num_nodes, options.num_gpus)
    if options.num_nodes > 1:
        raise ValueError(
            f"--num_nodes: expected 1 without a hostfile, got {options.num_nodes}. Name the hosts with "
            "--hostfile, or run the command on each with --no_ssh --node_rank N."
        )
    logger.info("no hostfile: running on this machine only")
    return choose_resources({"localhost": slots}, options.include, options.exclude, -1, options.num_gpus)


def _check_node_rank(options: argparse.Namespace, hosts: Resources) -> None:
    count = len(hosts)
    if options.no_ssh and count > 1 and options.node_rank < 0:
        raise ValueError(
            f"--node_rank: expected 0 to {count - 1} with --no_ssh, got nothing. "
            "Run the command on each host with its number."
        )
    if options.node_rank >= count:
        raise ValueError(
            f"--node_rank: expected 0 to {count - 1}, as the job has the hosts {', '.join(hosts)}, "
            f"got {options.node_rank}. Name all hosts with --hostfile, or give --num_nodes."
        )
    if options.node_rank > 0 and not options.no_ssh:
        raise ValueError(
            f"--node_rank: expected it with --no_ssh only, got {options.node_rank}. "
            "Add --no_ssh and run the command on each host, or leave --node_rank out."
        )


def _address(options: argparse.Namespace, hosts: Resources) -> str:
    first = next(iter(hosts))
    launcher = options.launcher.lower()
    if not options.no_ssh:
        check_program(launcher)
    if options.master_addr:
        return str(options.master_addr)
    if options.no_ssh and first.startswith("node-"):
        raise ValueError(
            "--master_addr: expected the address of host 0 without a hostfile, got nothing. Pass it."
        )
    if options.no_ssh or options.no_ssh_check or not LAUNCHERS[launcher].finds_address:
        return first
    return first_address(first, options.ssh_port)


def _choose_port(asked: int | None, here: bool, is_first: bool) -> int:
    """Return the port where ranks meet: the one asked for, else the default.

    Args:
        asked: None to choose.
        here: All ranks are on this host: another port serves if the default is taken, or 0 is asked for.
        is_first: This host is the first of several, and must be able to bind the port.

    Raises:
        ValueError: The port asked for is taken, or no number that all hosts could know.
    """
    wanted = _DEFAULT_PORT if asked is None else asked
    if not here:
        if wanted == 0 or (is_first and not _can_bind(wanted)):
            got = "0" if wanted == 0 else f"{wanted}, which is taken"
            raise ValueError(
                f"--master_port: expected a free port that is the same on all hosts, got {got}. Choose one."
            )
        return wanted
    if wanted != 0 and _can_bind(wanted):
        return wanted
    if asked:
        raise ValueError(
            f"--master_port: expected a free port, got {asked}, which is taken. "
            "Choose another, or leave the flag out to have a free one picked."
        )
    with socket.socket() as probe:
        probe.bind(("", 0))
        free = int(probe.getsockname()[1])
    if asked is None:
        logger.info("port %d is taken: using %d", wanted, free)
    return free


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _program(options: argparse.Namespace) -> tuple[str, ...]:
    python = () if options.no_python else (sys.executable, "-u")
    return (*python, *(("-m",) if options.module else ()), options.user_script)


if __name__ == "__main__":
    main()
