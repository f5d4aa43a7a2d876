"""What a function of stock must look like for a replacement to stand in for it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """The part of a function that a replacement relies on.

    Args:
        parameters: names of its parameters, in order; None if they do not matter.
        uses: names that its code must read or call; a replacement does the same through them, or instead.
    """

    parameters: tuple[str, ...] | None
    uses: tuple[str, ...] = ()


def mismatch(owner: Any, shapes: Mapping[str, Shape]) -> str | None:
    """What differs from the expected shapes, or None.

    Args:
        owner: the class that has the functions.
        shapes: expected, by the function's name.
    """
    for name, shape in shapes.items():
        place = f"{owner.__module__}.{owner.__qualname__}.{name}"
        function = inspect.unwrap(getattr(owner, name, None) or _absent)
        if function is _absent:
            return f"{place}: expected a method, got none"
        parameters = tuple(inspect.signature(function).parameters)
        if shape.parameters is not None and parameters != shape.parameters:
            return f"{place}: expected parameters {shape.parameters}, got {parameters}"
        missing = set(shape.uses) - set(_names(function.__code__))
        if missing:
            return f"{place}: expected code that uses {', '.join(sorted(missing))}, got none"
    return None


def _absent() -> None:
    """Stands for a function that does not exist."""


def _names(code: CodeType) -> Iterator[str]:
    """Every name in a function's code and in the functions within it."""
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
