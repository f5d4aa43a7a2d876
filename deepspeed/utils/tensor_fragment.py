"""Reading and writing what ZeRO keeps of one parameter: fp32 master, reduced gradient, optimizer state.

A parameter under ZeRO carries ``_ds_accessor``, a weak reference to the optimizer's accessor. Without one, or
once the optimizer is gone, getters return None. Getters are collective: every rank calls them for the same
parameters in the same order. Setters take the whole value on every rank, and are to be called on every rank.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import torch

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]


class _Accessor(Protocol):
    def get_full_fp32_param(self, param: torch.nn.Parameter) -> torch.Tensor: ...

    def get_full_grad(self, param: torch.nn.Parameter) -> torch.Tensor | None: ...

    def get_full_optimizer_state(self, param: torch.nn.Parameter, key: str) -> torch.Tensor | None: ...

    def set_full_fp32_param(self, param: torch.nn.Parameter, value: torch.Tensor) -> None: ...

    def set_full_grad(self, param: torch.nn.Parameter, value: torch.Tensor) -> None: ...

    def set_full_optimizer_state(self, param: torch.nn.Parameter, value: torch.Tensor, key: str) -> None: ...


def _accessor(param: torch.nn.Parameter) -> _Accessor | None:
    reference: Any = getattr(param, "_ds_accessor", None)
    return reference() if reference is not None else None


def _accessor_for_writing(param: torch.nn.Parameter, value: torch.Tensor) -> _Accessor:
    accessor = _accessor(param)
    if accessor is None:
        raise RuntimeError(
            "param: expected a parameter of a live DeepSpeed engine's optimizer, got one without. "
            "Call deepspeed.initialize first, and pass a trainable parameter of its model."
        )
    if value.shape != param.shape:
        raise ValueError(f"value: expected shape {tuple(param.shape)}, got {tuple(value.shape)}.")
    return accessor


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the fp32 master of a parameter, whole and in its shape, or None without ZeRO. Collective."""
    accessor = _accessor(param)
    return accessor.get_full_fp32_param(param) if accessor is not None else None


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the reduced gradient of a parameter, whole, in fp32, without loss scale. Collective.

    None after ``step()`` and before the next backward. Without ZeRO: ``param.grad``.
    """
    accessor = _accessor(param)
    return accessor.get_full_grad(param) if accessor is not None else param.grad


def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return optimizer state of a parameter, such as "exp_avg", whole, or None. Collective."""
    accessor = _accessor(param)
    return accessor.get_full_optimizer_state(param, optim_state_key) if accessor is not None else None


def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Overwrite the fp32 master of a parameter, and the parameter with it.

    Args:
        param: A parameter of the engine's model.
        value: [param.shape], any floating dtype, the same on every rank.

    Raises:
        RuntimeError: No engine trains this parameter.
        ValueError: Another shape.
    """
    _accessor_for_writing(param, value).set_full_fp32_param(param, value)


def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Overwrite the reduced gradient of a parameter before ``step()``.

    Args and errors as ``safe_set_full_fp32_param``.
    """
    _accessor_for_writing(param, value).set_full_grad(param, value)


def safe_set_full_optimizer_state(
    param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Overwrite optimizer state of a parameter; args and errors as ``safe_set_full_fp32_param``."""
    _accessor_for_writing(param, value).set_full_optimizer_state(param, value, optim_state_key)


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return None: only ZeRO-3 gives parameters a partition of their own."""
    return None


def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return None: only ZeRO-3 gives gradients a partition of their own."""
    return None


def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return None: only ZeRO-3 partitions state parameter by parameter."""
    return None


def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Refuse: only ZeRO-3 gives parameters a partition of their own."""
    _refuse_local("safe_set_local_fp32_param", "safe_set_full_fp32_param")


def safe_set_local_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Refuse: only ZeRO-3 gives gradients a partition of their own."""
    _refuse_local("safe_set_local_grad", "safe_set_full_grad")


def safe_set_local_optimizer_state(
    param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Refuse: only ZeRO-3 partitions state parameter by parameter."""
    _refuse_local("safe_set_local_optimizer_state", "safe_set_full_optimizer_state")


def _refuse_local(name: str, instead: str) -> NoReturn:
    raise NotImplementedError(
        f"{name}: expected a parameter partitioned by ZeRO-3, got one that is not. Use {instead}."
    )
