"""Applies the patch when `deepspeed` is imported, in every process of an environment with DEEPSPEED_LEAN=1.

`deepspeed_lean.pth`, which Python reads at its start, calls `install` if the variable is set. That costs a
process without DeepSpeed nothing: neither torch nor deepspeed is imported before someone imports deepspeed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "DEEPSPEED_LEAN"
_TARGET = "deepspeed"


def install() -> None:
    """Apply the patch at the end of the first import of `deepspeed`. A second call changes nothing."""
    if _TARGET not in sys.modules and not any(isinstance(item, _Finder) for item in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds `deepspeed` as the finders behind it do, and has what they found patched after it was loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of `deepspeed` with a loader that also patches; None for every other module.

        None also if the program has switched the variable off by now.

        Raises:
            ValueError: DEEPSPEED_LEAN has a value without meaning.
        """
        choice = os.environ.get(VARIABLE, "1")
        if fullname != _TARGET or choice in ("", "0"):
            return None
        # Said here and not at Python's start, where it would end nothing and show in every process.
        if choice != "1":
            raise ValueError(f"{VARIABLE}: expected 1, 0 or nothing, got {choice!r}. Correct or unset it.")
        # Those before it were asked already. None of them is asked through the import system: it would ask
        # this one again.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if spec.loader is not None and not isinstance(spec.loader, _Loader):
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def uninstall(self) -> None:
        """Stop finding."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader(Loader):
    """Loads `deepspeed` as the loader that was found does, then applies the patch.

    Who asks the module for its loader gets the one that was found.
    """

    def __init__(self, found: Loader, finder: _Finder) -> None:
        self._found = found
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        """Returns what the found loader has: sources, resources, file names."""
        return getattr(self._found, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Returns what the found loader makes."""
        return self._found.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then patch it. If either fails, the import fails, and the next one tries again."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._found
        module.__loader__ = self._found
        self._found.exec_module(module)
        _apply()
        self._finder.uninstall()


def _apply() -> None:
    try:
        importlib.import_module("deepspeed_lean").apply()
    except ValueError:
        raise  # a setting: its own words say what to do
    except Exception as error:
        # Never an ImportError: many a caller takes that for "not installed" and goes on without.
        raise RuntimeError(
            f"{VARIABLE}: expected deepspeed_lean.apply() to patch this deepspeed, got "
            f"{type(error).__name__}: {error}. Unset {VARIABLE} to go on without the patch."
        ) from error
