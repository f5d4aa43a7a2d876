"""Which rank this process is: read from the environment that its launcher left."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

LOCAL_HOST = "127.0.0.1"


class LaunchEnv(NamedTuple):
    """Place of this process in its job. What the launcher did not say is None."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    master_addr: str | None
    master_port: int | None


class _Launcher(NamedTuple):
    name: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str


_MPI_LAUNCHERS = (
    _Launcher(
        "OpenMPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def read_launch_env(env: Mapping[str, str] | None = None, foreign: bool = True) -> LaunchEnv | None:
    """Return the place of this process, or None if no launcher started it.

    Args:
        env: Environment to read; the process's own by default.
        foreign: Also recognize srun and mpirun, whose variables torch does not read.

    Raises:
        ValueError: The environment is incomplete or holds a non-number.
    """
    env = os.environ if env is None else env
    place = _torch_env(env)
    if place is None and foreign:
        place = _slurm_env(env) or _mpi_env(env)
    if place is not None and not 0 <= place.rank < place.world_size:
        raise ValueError(
            f"RANK: expected 0 to {place.world_size - 1}, got {place.rank} from {place.launcher}. "
            "Check the variables that the launcher sets."
        )
    return place


def _torch_env(env: Mapping[str, str]) -> LaunchEnv | None:
    if "RANK" not in env and _number(env, "WORLD_SIZE", 1) == 1:
        return None
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in env:
            raise ValueError(
                f"{name}: expected a number in the environment beside {other}={env[other]}, got nothing. "
                "Start with torchrun or deepspeed, or set both, or neither for one process."
            )
    rank = _number(env, "RANK", 0)
    return LaunchEnv(
        "the environment",
        rank,
        _number(env, "WORLD_SIZE", 1),
        _number(env, "LOCAL_RANK", rank % _number(env, "LOCAL_WORLD_SIZE", rank + 1)),
        _number(env, "LOCAL_WORLD_SIZE", 0) or None,
        env.get("MASTER_ADDR"),
        _port(env),
    )


def _slurm_env(env: Mapping[str, str]) -> LaunchEnv | None:
    """Read srun's variables. A batch script has SLURM_NTASKS too, but no step: it is one process."""
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env:
        return None
    world_size = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or ""
    return LaunchEnv(
        "srun",
        _number(env, "SLURM_PROCID", 0),
        world_size,
        _number(env, "SLURM_LOCALID", 0),
        tasks_of_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""), _number(env, "SLURM_NODEID", 0)),
        env.get("MASTER_ADDR") or first_host(nodes),
        _port(env),
    )


def _mpi_env(env: Mapping[str, str]) -> LaunchEnv | None:
    for launcher in _MPI_LAUNCHERS:
        if launcher.rank in env and launcher.world_size in env:
            world_size = _number(env, launcher.world_size, 1)
            local_size = _number(env, launcher.local_size, 0)
            return LaunchEnv(
                launcher.name,
                _number(env, launcher.rank, 0),
                world_size,
                _number(env, launcher.local_rank, 0),
                local_size or None,
                env.get("MASTER_ADDR") or (LOCAL_HOST if local_size == world_size else None),
                _port(env),
            )
    return None


def first_host(nodelist: str) -> str | None:
    """Return the first host of a SLURM node list such as "gpu[03-05,9],login1"; None for an empty one."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodelist.strip())
    return "".join(part or "" for part in match.groups()) if match else None


def tasks_of_node(layout: str, node: int) -> int | None:
    """Return the number of tasks on a node from SLURM's "4(x2),1"; None if it does not say."""
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", layout):
        counts += [int(count)] * int(repeat or 1)
    return counts[node] if node < len(counts) else None


def _port(env: Mapping[str, str]) -> int | None:
    return _number(env, "MASTER_PORT", 0) or None


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    value = env.get(name, "")
    if value == "":
        return default
    if not value.strip().isdecimal():
        raise ValueError(f"{name}: expected a number in the environment, got {value!r}. Correct or unset it.")
    return int(value)
