"""Marking modules that ZeRO-3 must fetch whole. Clients mark at any stage.

Below stage 3 the mark changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

_MARK = "_z3_leaf"


def z3_leaf_module(model: torch.nn.Module) -> bool:
    """Return whether a module is marked."""
    return bool(getattr(model, _MARK, False))


def get_z3_leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the marked modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: torch.nn.Module, flag: bool) -> None:
    """Mark one module, or take the mark away."""
    setattr(model, _MARK, flag)


def set_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Mark every module of some classes.

    Args:
        model: Where to look, itself included.
        leaf_module_classes: Classes, names of classes, or names with their module path.
        raise_if_not_found: Whether finding none is an error.

    Returns:
        The modules marked.

    Raises:
        ValueError: None was found.
    """
    return _mark(model, list(leaf_module_classes), True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Take the mark from every module of some classes; args, result and errors as ``set_z3_leaf_modules``."""
    return _mark(model, list(leaf_module_classes), False, raise_if_not_found)


def _mark(
    model: torch.nn.Module, classes: list[type | str], flag: bool, raise_if_not_found: bool
) -> list[torch.nn.Module]:
    found = [module for module in model.modules() if any(_is_of(module, cls) for cls in classes)]
    if not found and raise_if_not_found:
        raise ValueError(f"leaf_module_classes: expected classes of modules in the model, got {classes}.")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_of(module: torch.nn.Module, cls: type | str) -> bool:
    if isinstance(cls, str):
        own = type(module)
        return cls in (own.__name__, own.__qualname__, f"{own.__module__}.{own.__qualname__}")
    return isinstance(module, cls)
