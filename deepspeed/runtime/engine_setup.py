"""What `DeepSpeedEngine` does once, at construction.

Place the model, choose optimizer, settings and schedule.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_forms import accumulation_dtype, state_forms
from deepspeed.runtime.lr_schedules import build_lr_scheduler
from deepspeed.runtime.optimizers import build_optimizer, check_client_optimizer
from deepspeed.runtime.precision import LossScalerBase, create_loss_scaler
from deepspeed.runtime.zero import collectives
from deepspeed.runtime.zero.collectives import Comm
from deepspeed.runtime.zero.settings import Accumulation, ZeroSettings
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

logger = logging.getLogger("DeepSpeed")

ClientOptimizer = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


def training_device(args: Any = None) -> torch.device:
    """Where this rank trains: the device of its local rank, which becomes the current one.

    A rank that sees one device trains there, whatever its local rank.

    Args:
        args: its `device_rank`, if it has one, is the device's index, as Lightning passes it.

    Raises:
        ValueError: more ranks were started here than this machine has devices.

    Source: the device that DeepSpeed 0.19.8 selects.
    """
    accelerator = get_accelerator()
    index = getattr(args, "device_rank", None)
    if index is None and accelerator.device_count() > 1 and "LOCAL_RANK" in os.environ:
        index = _device_of_local_rank(accelerator.device_count())
    if index is not None:
        accelerator.set_device(index)
    return torch.device(accelerator.current_device_name())


def _device_of_local_rank(count: int) -> int:
    local_rank = int(os.environ["LOCAL_RANK"])
    ranks = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if ranks > count:  # seen by all ranks of the machine alike, so that none waits for the others
        raise ValueError(
            f"LOCAL_RANK: expected at most {count} ranks on a machine with {count} devices, got {ranks}. "
            "Start fewer (--num_gpus, --nproc_per_node), or let each rank see one (CUDA_VISIBLE_DEVICES)."
        )
    return local_rank


def data_parallel_comm(mpu: Any) -> Comm:
    """The data-parallel ranks: all of them, or the group that a model-parallel unit names.

    Raises:
        NotImplementedError: the unit splits the model over more than one rank.
    """
    if mpu is None:
        return Comm.of(dist.group.WORLD if dist.is_initialized() else None)
    if mpu.get_model_parallel_world_size() > 1:
        raise NotImplementedError(
            f"mpu: expected a model-parallel world of 1, got {mpu.get_model_parallel_world_size()}. "
            "Tensor and pipeline parallelism are not here; use data parallelism only."
        )
    return Comm.of(mpu.get_data_parallel_group())


def place_model(module: torch.nn.Module, config: DeepSpeedConfig, device: torch.device, comm: Comm) -> None:
    """Move a model to the device in the configured dtype, with rank 0's values on every rank.

    One tensor at a time, in place: parameters stay the same objects, so optimizers over them stay valid.
    Buffers keep their dtype, as in stock: tables of positions and running statistics need it.

    Raises:
        NotImplementedError: a parameter is marked as an expert's, to be reduced over fewer ranks.
    """
    experts = [name for name, param in module.named_parameters() if not getattr(param, "allreduce", True)]
    if experts:
        raise NotImplementedError(
            f"model: expected parameters that all data-parallel ranks share, got {experts} with allreduce "
            "False. Expert parallelism is not here; keep every expert on every rank and leave the mark out."
        )
    if config.fp16.enabled or config.bf16.enabled:
        for param in module.parameters():
            if param.is_floating_point():
                param.data = param.data.to(device=device, dtype=config.dtype)
    module.to(device=device)
    for tensor in list(module.parameters()) + list(module.buffers()):
        if not tensor.is_contiguous():
            tensor.data = tensor.data.contiguous()
        collectives.broadcast(tensor.data, 0, comm)


def choose_optimizer(
    client: ClientOptimizer | None,
    model_parameters: Iterable[Any] | None,
    module: torch.nn.Module,
    config: DeepSpeedConfig,
) -> torch.optim.Optimizer | None:
    """The client's optimizer, else the one that the configuration names, else None.

    Args:
        client: optimizer, or a callable that makes one from parameters.
        model_parameters: parameters or groups for it; by default the trainable ones of the model.
        module: the model.
        config: the configuration.

    Raises:
        ValueError: what was given is no optimizer, or needs whole matrices.
    """
    given = list(model_parameters) if model_parameters is not None else []
    parameters = given or [param for param in module.parameters() if param.requires_grad]
    offload = config.zero_optimization.offloads_optimizer
    if client is not None:
        makes = callable(client) and not hasattr(client, "step")
        optimizer = cast(Any, client)(parameters) if makes else cast(torch.optim.Optimizer, client)
        check_client_optimizer(optimizer, config)
        return optimizer
    if config.optimizer is None or not parameters:
        return None
    return build_optimizer(config.optimizer.type, config.optimizer.params, parameters, offload)


def zero_settings(config: DeepSpeedConfig, device: torch.device) -> ZeroSettings:
    """The ZeRO optimizer's settings from the configuration."""
    zero = config.zero_optimization
    accumulation = accumulation_dtype(config)
    return ZeroSettings(
        stage=int(zero.stage),
        device=device,
        offload=zero.offloads_optimizer,
        pin_memory=zero.pins_staging and device.type == "cuda",
        reduce_bucket_numel=zero.reduce_bucket_numel,
        allgather_bucket_numel=zero.allgather_bucket_numel,
        overlap_comm=zero.overlap_comm is not False,
        wire_dtype=config.communication_data_type,
        accumulation=Accumulation(
            dtype=accumulation,
            keeps_16bit=config.gradient_accumulation_steps == 1,
            is_separate=accumulation not in (None, config.dtype),
        ),
        forms=state_forms(config),
        gradient_clipping=config.gradient_clipping,
        skip_nonfinite=not config.bf16.enabled or config.bf16.check_grad_overflow,
        ignore_unused_parameters=zero.ignore_unused_parameters,
    )


def make_loss_scaler(config: DeepSpeedConfig) -> LossScalerBase:
    """The loss scaler that `fp16` asks for; a static 1 otherwise."""
    return create_loss_scaler(config.fp16 if config.fp16.enabled else None)


def choose_lr_scheduler(
    client: Any, config: DeepSpeedConfig, optimizer: DeepSpeedZeroOptimizer | None
) -> Any:
    """The client's schedule, made if it is callable, else the one that the configuration names, else None.

    A frozen model under a training configuration has neither.

    Raises:
        ValueError: a schedule without an optimizer.
    """
    scheduler = config.scheduler
    if optimizer is None:
        if config.optimizer is None and (scheduler is not None or callable(client)):
            key, got = "lr_scheduler", type(client).__name__
            if scheduler is not None:
                key, got = "scheduler.type", scheduler.type
            raise ValueError(
                f"{key}: expected an optimizer to schedule, got {got!r} without one. "
                "Add an optimizer to the configuration or deepspeed.initialize, or leave the scheduler out."
            )
        return client if not callable(client) else None
    if client is not None:
        return client(optimizer.optimizer) if callable(client) else client
    if scheduler is None:
        return None
    return build_lr_scheduler(scheduler.type, scheduler.params, optimizer.optimizer)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in nested containers as `dtype`; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(cast_floats(item, dtype) for item in value)
    return value
