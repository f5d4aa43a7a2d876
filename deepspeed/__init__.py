"""DeepSpeed Lean: DeepSpeed's training API for ZeRO 0, 1 and 2, with the optimizer on the host.

Importing has no side effects: no device is touched, no process group is made, no op is built.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch

from deepspeed import accelerator, checkpointing, comm, module_inject, ops, runtime, utils, zero
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import init_distributed
from deepspeed.git_version_info import git_branch, git_hash
from deepspeed.module_inject import tp_model_init
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError, choose_config
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.logging import log_dist, logger
from deepspeed.version import __version__

version = __version__

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "git_branch",
    "git_hash",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "lr_schedules",
    "module_inject",
    "ops",
    "runtime",
    "tp_model_init",
    "utils",
    "version",
    "zero",
]


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: torch.utils.data.Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Make an engine that trains a module.

    Args:
        args: may carry `deepspeed_config`, the path of the configuration, and `device_rank`, the index of the
            device; else it is the local rank's.
        model: the module; moved to this rank's device and cast to the configured dtype in place.
        optimizer: a torch optimizer over its parameters, or a callable that makes one; overrides the
            configuration's.
        model_parameters: parameters or groups for the configuration's optimizer; by default all trainable
            ones.
        training_data: a dataset; a loader over it is returned.
        lr_scheduler: a schedule, or a callable that makes one from an optimizer; overrides the
            configuration's.
        distributed_port: port of rank 0 when none is set.
        mpu: an object that names the data-parallel group.
        dist_init_required: False when torch.distributed is initialized already.
        collate_fn: for the returned loader.
        config: mapping, path, JSON text or base64 of it.
        mesh_param: refused.
        config_params: the same as `config`, under its older name.

    Returns:
        `(engine, optimizer, dataloader, lr_scheduler)`; the last three are None where there is none.

    Raises:
        ValueError: a wrong model, configuration, optimizer or schedule, before any collective.
        NotImplementedError: what DeepSpeed has and this package has not.

    Source: signature of deepspeed.initialize, DeepSpeed 0.19.8.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}. Pass model=.")
    if mesh_param is not None:
        raise NotImplementedError("mesh_param: expected None, got a device mesh. Use data parallelism only.")
    source = choose_config(args, config, config_params)
    if not torch.distributed.is_initialized():
        init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    world = mpu.get_data_parallel_world_size() if mpu is not None else torch.distributed.get_world_size()
    engine = DeepSpeedEngine(
        args,
        model,
        optimizer,
        model_parameters,
        training_data,
        lr_scheduler,
        mpu,
        collate_fn,
        config=DeepSpeedConfig(source, world),
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to a parser.

    Args:
        parser: the script's parser; changed in place.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("DeepSpeed", "settings of the training engine")
    group.add_argument(
        "--deepspeed", action="store_true", help="use DeepSpeed; scripts read it, the engine does not"
    )
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the configuration (JSON)")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    return parser
