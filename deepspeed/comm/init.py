"""``init_distributed``: one process group from whatever started this process."""

from __future__ import annotations

import atexit
import gc
import logging
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import TCPStore

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.launch_env import LOCAL_HOST, LaunchEnv, read_launch_env

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

DEFAULT_PORT = 29500

logger = logging.getLogger("DeepSpeed")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | float | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: DeepSpeedConfig | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialize torch.distributed, unless it is already.

    The place of this process comes from the arguments, else from torchrun's variables, else from srun's or
    mpirun's. Without any of these the process is a world of its own, on a free local port.

    Args:
        dist_backend: Name of a torch backend; None for the device's own. "nccl" without a GPU becomes gloo.
        auto_mpi_discovery: Read srun's and mpirun's variables too.
        distributed_port: Port of rank 0 when MASTER_PORT is not set.
        verbose: Log backend and world size.
        timeout: Limit of a collective, a timedelta or seconds; None for torch's default.
        init_method: torch's URL of the rendezvous.
        dist_init_required: False forbids to initialize here; True and None initialize when needed.
        config: Accepted for DeepSpeed's signature; not read.
        rank: Rank of this process; -1 to find it.
        world_size: Number of processes; -1 to find it.

    Raises:
        RuntimeError: The port is taken, or nothing is initialized though ``dist_init_required`` is False.
        ValueError: An argument or a launcher's variable cannot be used.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError(
            "dist_init_required: expected an initialized process group, got none. "
            "Call torch.distributed.init_process_group first, or leave dist_init_required out."
        )
    limit = _timeout(timeout)
    place = _place(rank, world_size, auto_mpi_discovery)
    backend = choose_backend(dist_backend)
    _export(place)
    if verbose and place.rank == 0:
        logger.info("torch.distributed: backend %s, world size %d", backend, place.world_size)
    options: dict[str, Any] = {"backend": backend, "rank": place.rank, "world_size": place.world_size}
    if limit is not None:
        options["timeout"] = limit
    if init_method is not None and not init_method.startswith("env://"):
        dist.init_process_group(init_method=init_method, **options)
    else:
        _init_from_env(place, distributed_port, options)
    if backend == "gloo":
        atexit.register(_leave)


def _leave() -> None:
    """End a gloo group before the interpreter: one that outlives it may abort a process that had succeeded.

    Engines let go of the group before; exit functions run in reverse order.
    """
    gc.collect()  # what holds the group in a cycle
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_backend(wanted: str | None) -> str:
    """Return the torch backend to use.

    Args:
        wanted: A backend's name, in any letter case, torch's "cpu:gloo,cuda:nccl" form, or None.

    Raises:
        ValueError: torch does not have this backend here.
    """
    accelerator = get_accelerator()
    own = accelerator.communication_backend_name()
    if wanted is None:
        return own if dist.is_backend_available(own) else "gloo"
    name = wanted.lower()
    if "nccl" in name and own != "nccl":
        logger.warning("dist_backend: nccl needs a GPU and there is none; using gloo.")
        return "gloo"
    missing = [
        part for part in (item.rpartition(":")[2] for item in name.split(",")) if not _has_backend(part)
    ]
    if missing:
        raise ValueError(
            f"dist_backend: expected a backend that torch has here, got {wanted!r}. "
            f"Use {own!r}, or leave it out to have it chosen."
        )
    return name


def _has_backend(name: str) -> bool:
    return bool(dist.is_backend_available(name))


def _timeout(timeout: timedelta | float | None) -> timedelta | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, timedelta)):
        raise ValueError(
            f"timeout: expected seconds or a timedelta, got {timeout!r}. Pass a number of seconds."
        )
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if limit <= timedelta(0):
        raise ValueError(f"timeout: expected a time > 0, got {timeout!r}. Leave it out for torch's default.")
    return limit


def _place(rank: int, world_size: int, foreign: bool) -> LaunchEnv:
    place = read_launch_env(foreign=foreign) or LaunchEnv("no launcher", 0, 1, 0, 1, None, None)
    if rank < 0 and world_size < 0:
        return place
    place = place._replace(
        rank=rank if rank >= 0 else place.rank, world_size=world_size if world_size > 0 else place.world_size
    )
    if place.rank >= place.world_size:
        raise ValueError(
            f"rank: expected less than the world size {place.world_size}, got {place.rank}. "
            "Pass both rank and world_size, or neither."
        )
    return place


def _export(place: LaunchEnv) -> None:
    """Leave the place in torchrun's variables, where scripts look for it after this call."""
    os.environ.setdefault("RANK", str(place.rank))
    os.environ.setdefault("WORLD_SIZE", str(place.world_size))
    os.environ.setdefault("LOCAL_RANK", str(place.local_rank))
    if place.local_world_size is not None:
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(place.local_world_size))


def _init_from_env(place: LaunchEnv, distributed_port: int, options: dict[str, Any]) -> None:
    if place.world_size == 1:  # needs no address, so that a taken MASTER_PORT cannot stop it
        store = TCPStore(LOCAL_HOST, 0, 1, is_master=True)
        dist.init_process_group(store=store, **options)
        return
    address = place.master_addr or os.environ.get("MASTER_ADDR")
    if address is None:
        raise ValueError(
            f"MASTER_ADDR: expected the host of rank 0, as {place.launcher} says {place.world_size} ranks, "
            "got nothing. Set MASTER_ADDR in the environment of every rank."
        )
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", str(place.master_port or distributed_port))
    try:
        dist.init_process_group(init_method="env://", **options)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise RuntimeError(
            f"MASTER_PORT: expected a free port on {address}, got {os.environ['MASTER_PORT']}, which is in "
            "use. Choose another with --master_port (deepspeed, torchrun), MASTER_PORT, or distributed_port=."
        ) from None
