"""Optimizers by name, and the check that an optimizer may run on a shard.

ZeRO hands an optimizer one flat shard per group. Elementwise rules (Adam, SGD, Lion, ...) give the same
weights there as on whole parameters; rules that look at a matrix, at a layer's norm or at all parameters
together do not, and are refused with their reason.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.named_class import construct

__all__ = ["build_optimizer", "check_client_optimizer", "check_elementwise", "whole_tensor_reason"]

# Pattern over lower-case class names -> what the optimizer needs that a shard does not have.
_WHOLE_TENSOR_RULES: tuple[tuple[str, str], ...] = (
    (r"muon", "it orthogonalises whole matrices"),
    (r"shampoo|^soap$|^kfac$", "it preconditions whole matrices"),
    (r"adafactor|^came$", "it keeps row and column statistics of whole matrices"),
    (r"galore|^apollo|^flora", "it projects whole matrices"),
    (r"^(ds)?lamb$|^(fused|onebit)lamb$|^lars$|^lans$", "it scales updates by the norm of each layer"),
    (r"novograd|stableadamw", "it normalises by statistics of each layer"),
    (r"lbfgs", "it takes inner products over all parameters and needs a closure"),
    (r"prodigy|dadapt", "it estimates the step size from sums over all parameters"),
    (r"sparseadam", "it needs sparse gradients"),
    (r"onebitadam|zerooneadam", "it compresses gradients by itself"),
    (r"^mu(adamw?|sgd)$", "it scales rates by the shape of each layer"),
)
_ADAM_NAMES = ("adam", "adamw")
_REFUSED_PARAMS = {"max_grad_norm": "Use gradient_clipping at the top level of the configuration."}


def whole_tensor_reason(class_name: str) -> str | None:
    """Return why an optimizer of this name cannot run on a shard, or None if nothing is known against it.

    Args:
        class_name: Name of a class or of `optimizer.type`, in any letter case.
    """
    name = class_name.lower().replace("_", "")
    return next((reason for pattern, reason in _WHOLE_TENSOR_RULES if re.search(pattern, name)), None)


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer gives the same weights on a flat shard as on whole parameters.

    Raises:
        ValueError: Its class, or one that it derives from, is known to need more than single elements.
    """
    for cls in type(optimizer).__mro__:
        reason = whole_tensor_reason(cls.__name__)
        if reason is not None:
            raise ValueError(_refusal("optimizer", type(optimizer).__name__, reason))


def check_client_optimizer(optimizer: Any, config: DeepSpeedConfig) -> None:
    """Check an optimizer that a client hands to ``initialize``.

    Args:
        optimizer: The object.
        config: The configuration; stage 0 without offload takes the same path and the same rules.

    Raises:
        ValueError: It is no optimizer, or needs whole matrices.
    """
    if not callable(getattr(optimizer, "step", None)) or not hasattr(optimizer, "param_groups"):
        named = config.optimizer.type if config.optimizer else "absent"
        raise ValueError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__} without step() and "
            "param_groups. A placeholder of an integration stands for the configuration's optimizer: "
            f"name one there (optimizer.type is {named}) and pass optimizer=None."
        )
    check_elementwise(optimizer)


def build_optimizer(
    name: str,
    params_dict: Mapping[str, Any],
    param_groups: Iterable[Any],
    offload: bool,
    zero_enabled: bool = True,
) -> torch.optim.Optimizer:
    """Build the optimizer that a configuration names.

    Args:
        name: `optimizer.type`: Adam, AdamW, Adagrad, Lion or any class of torch.optim, in any letter case.
        params_dict: `optimizer.params`, the constructor's keyword arguments. For Adam and AdamW also
            `torch_adam` (torch's own class) and `adam_w_mode` (for Adam: decoupled decay, true unless given).
        param_groups: Parameters or groups; group dicts are kept, not copied.
        offload: Whether it will run on host shards.
        zero_enabled: Whether it will run on shards at all.

    Raises:
        ValueError: An unknown name or parameter, or an optimizer that needs whole matrices.
        NotImplementedError: An optimizer that DeepSpeed has and this package has not.

    Source: names, defaults and the choice of class of DeepSpeed 0.19.8; weight decay is 0 unless given,
    torch's own default with `torch_adam`.
    """
    params = dict(params_dict)
    cls = _optimizer_class(name, params, offload, zero_enabled)
    for key, remedy in _REFUSED_PARAMS.items():
        if key in params:
            raise ValueError(f"optimizer.params.{key}: expected no such key, got {params[key]!r}. {remedy}")
    optimizer: torch.optim.Optimizer = construct("optimizer", cls, list(param_groups), params)
    return optimizer


def _optimizer_class(name: str, params: dict[str, Any], offload: bool, zero_enabled: bool) -> type:
    """Return the class for a name; rewrites switches in ``params`` into arguments of that class."""
    lowered = name.lower()
    if lowered in _ADAM_NAMES:
        return _adam_class(lowered, params, offload)
    if lowered == "adagrad" and offload:
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

        return DeepSpeedCPUAdagrad
    if lowered == "lion":
        from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

        return DeepSpeedCPULion if offload else FusedLion
    reason = whole_tensor_reason(name)
    cls = _torch_classes().get(lowered)
    if reason is not None and (zero_enabled or cls is None):
        raise NotImplementedError(_refusal("optimizer.type", name, reason))
    if cls is None:
        raise ValueError(
            f"optimizer.type: expected Adam, AdamW, Adagrad, Lion or a class of torch.optim, got {name!r}. "
            "Pass other optimizers to deepspeed.initialize as optimizer=."
        )
    return cls


def _adam_class(lowered: str, params: dict[str, Any], offload: bool) -> type:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    for switch in ("adam_w_mode", "torch_adam"):
        if params.get(switch, False) not in (True, False):
            raise ValueError(
                f"optimizer.params.{switch}: expected true or false, got {params[switch]!r}. "
                "Correct the value, or leave the key out for its default."
            )
    decoupled = params.pop("adam_w_mode", True) or lowered == "adamw"
    if params.pop("torch_adam", False):
        return torch.optim.AdamW if decoupled else torch.optim.Adam
    params.setdefault("adamw_mode", decoupled)
    return DeepSpeedCPUAdam if offload else FusedAdam


def _torch_classes() -> dict[str, type]:
    """Return torch.optim's optimizers by lower-case name."""
    return {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls)
        and issubclass(cls, torch.optim.Optimizer)
        and cls is not torch.optim.Optimizer
    }


def _refusal(key: str, name: str, reason: str) -> str:
    return (
        f"{key}: expected an elementwise optimizer, got {name}: {reason}, and ZeRO gives it flat shards. "
        "Use Adam, AdamW, Adagrad, Lion, SGD or another elementwise optimizer."
    )
