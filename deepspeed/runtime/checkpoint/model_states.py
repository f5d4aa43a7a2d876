"""What the model file holds under stock's keys: weights, shapes, counters, the client's state."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.runtime.checkpoint.names import FORMAT_VERSION, CheckpointError
from deepspeed.runtime.checkpoint.torch_read import unreadable_classes
from deepspeed.runtime.zero.parts import ZeroParts

logger = logging.getLogger("DeepSpeed")

# Keys of the file that say how training stood: a client may repeat them, not contradict them.
_COUNTERS = (
    "skipped_steps",
    "global_steps",
    "global_samples",
    "micro_steps",
    "dp_world_size",
    "mp_world_size",
)
# Keys that stock's loader consumes, and what maps the file: neither is returned to the client.
_CONSUMED = (
    "module",
    "optimizer",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "frozen_param_fragments",
    *_COUNTERS,
)
_RETURNED_COUNTERS = ("global_samples",)


@dataclass(frozen=True)
class Counters:
    """How far training has come."""

    skipped_steps: int = 0
    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0


@dataclass(frozen=True)
class ModelParts:
    """What of the engine goes into the model file.

    Args:
        module: the model.
        weights: its state dictionary, as the client wants it saved.
        zero: the ZeRO optimizer's parts; None without an optimizer.
        optimizer: the whole optimizer state at stage 0, else None.
        lr_scheduler: the schedule's state dictionary or None.
        counters: how far training has come.
        world: number of data-parallel ranks.
        ds_config: the configuration as it was passed, plain.
    """

    module: torch.nn.Module
    weights: Mapping[str, torch.Tensor]
    zero: ZeroParts | None
    optimizer: Any
    lr_scheduler: Any
    counters: Counters
    world: int
    ds_config: Any


def model_states(parts: ModelParts, client_state: Mapping[str, Any], exclude_frozen: bool) -> dict[str, Any]:
    """The content of the model file.

    Raises:
        CheckpointError: the client's state uses a key of the file.
    """
    trainable = parts.zero is not None
    frozen = frozen_params(parts.module) if trainable and not exclude_frozen else None
    state: dict[str, Any] = {
        "module": parts.weights,
        "buffer_names": _persistent_buffers(parts.module),
        "optimizer": parts.optimizer,
        "param_shapes": param_shapes(parts.zero) if parts.zero is not None else None,
        "frozen_param_shapes": None
        if frozen is None
        else OrderedDict((k, v.shape) for k, v in frozen.items()),
        "shared_params": shared_params(parts.module) if trainable else None,
        "frozen_param_fragments": frozen,
        "lr_scheduler": parts.lr_scheduler,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": parts.counters.skipped_steps,
        "global_steps": parts.counters.global_steps,
        "global_samples": parts.counters.global_samples,
        "micro_steps": parts.counters.micro_steps,
        "dp_world_size": parts.world,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": parts.ds_config,
        "ds_version": FORMAT_VERSION,
    }
    _check_client_state(client_state, state)
    return {**state, **client_state}


def client_state_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The client's state and what stock returns beside it, independent of the file."""
    kept = {key: value for key, value in content.items() if key not in _CONSUMED or key in _RETURNED_COUNTERS}
    return _copied(kept)


def counters_of(content: Mapping[str, Any]) -> Counters:
    """How far training had come."""
    names = ("skipped_steps", "global_steps", "global_samples", "micro_steps")
    return Counters(**{name: int(content.get(name) or 0) for name in names})


def param_shapes(zero: ZeroParts) -> list[OrderedDict[str, torch.Size]]:
    """For each group name -> shape of its parameters, in flat order."""
    return [
        OrderedDict((zero.names[slot.index], zero.params[slot.index].shape) for slot in layout.slots)
        for layout in zero.groups
    ]


def frozen_params(module: torch.nn.Module) -> OrderedDict[str, torch.Tensor]:
    """Name -> value of the parameters that no optimizer state belongs to: frozen or empty."""
    return OrderedDict(
        (name, param.detach())
        for name, param in module.named_parameters()
        if not param.requires_grad or not param.numel()
    )


def shared_params(module: torch.nn.Module) -> dict[str, str]:
    """Second names of parameters -> their first."""
    first: dict[int, str] = {}
    shared = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            shared[name] = first[id(param)]
    return shared


def without_frozen(
    module: torch.nn.Module, weights: Mapping[str, torch.Tensor], prefix: str = ""
) -> OrderedDict[str, torch.Tensor]:
    """A state dictionary, with a prefix on its names, without the parameters that require no gradient."""
    params = module.named_parameters(prefix.rstrip("."), remove_duplicate=False)
    frozen = {name for name, param in params if not param.requires_grad}
    return OrderedDict((name, value) for name, value in weights.items() if name not in frozen)


def _persistent_buffers(module: torch.nn.Module) -> list[str]:
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]


def _check_client_state(client_state: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    for key, value in client_state.items():
        if key in state and not (key in _COUNTERS and value == state[key]):
            raise CheckpointError(
                f"client_state.{key}: expected a key that the file does not use itself, got {key!r}. Rename "
                "it."
            )
    for place, name in unreadable_classes(dict(client_state)):
        logger.warning(
            "client_state.%s: an object of %s: the file will load only where that class has been named to "
            "torch.serialization.add_safe_globals",
            place,
            name,
        )


def _copied(value: Any) -> Any:
    """Nested containers with every tensor copied out of the mapped file."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _copied(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value


def mismatches(module: torch.nn.Module, weights: Mapping[str, torch.Tensor], strict: bool) -> Iterator[str]:
    """Why weights do not fit a module, before anything is loaded.

    Modules that rename keys while they load are left to torch's own check.
    """
    own = module.state_dict()
    renames = any(part._load_state_dict_pre_hooks for part in module.modules())
    if strict and not renames:
        yield from (f"{name}: missing in the file" for name in own if name not in weights)
        yield from (f"{name}: not in the model" for name in weights if name not in own)
    for name, value in weights.items():
        target = own.get(name)
        if (
            isinstance(target, torch.Tensor)
            and isinstance(value, torch.Tensor)
            and target.shape != value.shape
        ):
            yield f"{name}: expected shape {tuple(target.shape)}, got {tuple(value.shape)}"
