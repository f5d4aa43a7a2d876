"""Makes the optimizer or schedule that a configuration names, with errors that say which key is wrong."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

__all__ = ["construct"]


def construct(section: str, cls: type[Any], subject: Any, params: Mapping[str, Any]) -> Any:
    """Return `cls(subject, **params)`.

    Args:
        section: key of the configuration, optimizer or scheduler, for errors.
        cls: its class; the first argument is what it optimizes or schedules.
        subject: that first argument.
        params: the `params` of the section.

    Raises:
        ValueError: an unknown or missing parameter, or a value that the class does not take.
    """
    accepted = list(inspect.signature(cls).parameters.values())[1:]
    names = [parameter.name for parameter in accepted]
    for key, value in params.items():
        if key not in names:
            raise ValueError(
                f"{section}.params.{key}: expected a parameter of {cls.__name__} ({', '.join(names)}), "
                f"got an unknown key with the value {value!r}. Correct the name, or leave the key out."
            )
    for parameter in accepted:
        if parameter.name in params:
            _check_like_default(section, parameter, params[parameter.name])
        elif parameter.default is parameter.empty:
            raise ValueError(
                f"{section}.params.{parameter.name}: expected a value for {cls.__name__}, got none. Add it."
            )
    try:
        return cls(subject, **params)
    except (TypeError, ValueError, IndexError) as error:
        if str(error).split(":")[0] in params:
            raise ValueError(f"{section}.params.{error}") from error
        raise ValueError(
            f"{section}.params: expected values that {cls.__name__} takes, got {dict(params)!r}: {error}. "
            "Correct the value."
        ) from error


def _check_like_default(section: str, parameter: inspect.Parameter, value: Any) -> None:
    """Raise if a value is of another kind than the parameter's default; a None there tells no kind."""
    default = parameter.default
    if isinstance(default, bool):
        expected, fits = "true or false", value in (True, False)
    elif isinstance(default, Real):
        # One number for each parameter group is for the class to accept or refuse.
        expected = "a number"
        fits = isinstance(value, (Real, torch.Tensor, list, tuple)) and not isinstance(value, bool)
    elif isinstance(default, (tuple, list)):
        expected = f"{len(default)} numbers"
        fits = isinstance(value, (tuple, list)) and len(value) == len(default)
    else:
        return
    if not fits:
        raise ValueError(
            f"{section}.params.{parameter.name}: expected {expected}, got {value!r}. "
            "Correct the value, or leave the key out for its default."
        )
