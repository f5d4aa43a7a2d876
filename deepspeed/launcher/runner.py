"""Entry point of the ``deepspeed`` command."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence

from deepspeed.launcher.arguments import parse_args
from deepspeed.launcher.launch import Job, run_job
from deepspeed.launcher.resources import Resources, choose_resources, parse_hostfile
from deepspeed.utils.logging import logger, set_log_level_from_string

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "main"]

# Clients write environment for remote hosts to a file of this name in the working directory.
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")

_LAUNCHERS = ("pdsh", "openmpi", "mvapich", "mpich", "impi", "slurm")
_DEFAULT_PORT = 29500
_LOOPBACK = "127.0.0.1"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def main(args: Sequence[str] | None = None) -> None:
    """Run a job as the command line says and exit with its exit code: 0, or the first failing rank's.

    Args:
        args: Words after the program's name; the process's own by default.
    """
    options = parse_args(args)
    try:
        set_log_level_from_string("error" if options.quiet else options.log_level)
        job = plan_job(options)
    except (ValueError, NotImplementedError) as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run_job(job))


def plan_job(options: argparse.Namespace) -> Job:
    """Return the job that a command line describes.

    Args:
        options: What ``parse_args`` returned.

    Raises:
        ValueError: Contradictory flags, an unknown device, a port that is taken.
        NotImplementedError: Several hosts, and flags of features that are not here.
    """
    _refuse_flags(options)
    on_device = _accelerator_count() > 0
    resources = _resources(options)
    _refuse_several_hosts(options, resources)
    (slots,) = resources.values()
    addr = options.master_addr or _LOOPBACK
    env = {_VISIBLE: ",".join(map(str, slots))} if on_device else {}
    return Job(
        program=_program(options),
        script_args=tuple(options.user_args),
        num_ranks=len(slots),
        master_addr=addr,
        master_port=_choose_port(options.master_port),
        log_dir=None if options.enable_each_rank_log == "None" else options.enable_each_rank_log,
        pass_local_rank=not options.no_local_rank,
        env=env,
    )


def _refuse_flags(options: argparse.Namespace) -> None:
    if options.launcher.lower() not in _LAUNCHERS:
        raise ValueError(f"--launcher: expected one of {', '.join(_LAUNCHERS)}, got {options.launcher!r}.")
    if options.module and options.no_python:
        raise ValueError("--module: expected no --no_python beside it, got both. A module needs Python.")
    for flag, instead in (
        ("bind_cores_to_rank", "Start the script under taskset or numactl."),
        ("bind_core_list", "Start the script under taskset or numactl."),
        ("force_multi", "Run torchrun on the other host."),
        ("save_pid", "Use the process id of this command."),
        ("autotuning", "Choose the batch size by hand."),
    ):
        if getattr(options, flag):
            raise NotImplementedError(
                f"--{flag}: expected it to be off, got it on; it is not here. {instead}"
            )


def _accelerator_count() -> int:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    return 0 if accelerator.device_name() == "cpu" else accelerator.device_count()


def _resources(options: argparse.Namespace) -> Resources:
    hosts = parse_hostfile(options.hostfile)
    if hosts is not None:
        pool = {host: list(range(count)) for host, count in hosts.items()}
        return choose_resources(pool, options.include, options.exclude, options.num_nodes, options.num_gpus)
    logger.info("no hostfile: running on this machine only")
    return choose_resources(
        {"localhost": _local_slots(options)}, options.include, options.exclude, -1, options.num_gpus
    )


def _local_slots(options: argparse.Namespace) -> list[int]:
    """Return this machine's devices: those that CUDA_VISIBLE_DEVICES names, else all.

    Without any, what was asked for.
    """
    count = _accelerator_count()
    if count == 0:
        return list(range(max(1, options.num_gpus)))
    visible = os.environ.get(_VISIBLE, "")
    if visible and all(number.strip().isdigit() for number in visible.split(",")):
        return [int(number) for number in visible.split(",")]
    return list(range(count))


def _refuse_several_hosts(options: argparse.Namespace, resources: Resources) -> None:
    hosts = max(len(resources), options.num_nodes, options.node_rank + 1)
    per_node = len(next(iter(resources.values())))
    if hosts > 1:
        raise NotImplementedError(
            f"--hostfile, --num_nodes, --node_rank: expected one host, got {hosts} ({', '.join(resources)}). "
            f"On each host run: torchrun --nnodes={hosts} --node_rank=N --nproc_per_node={per_node} "
            "--master_addr=HOST --master_port=29500 script ...; the engine reads torchrun's environment."
        )


def _choose_port(asked: int | None) -> int:
    """Return a port that can be bound here: the one asked for, else the default, else a free one.

    Raises:
        ValueError: The port asked for is taken.
    """
    wanted = _DEFAULT_PORT if asked is None else asked
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
