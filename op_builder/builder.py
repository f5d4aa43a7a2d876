"""What every op builder can do: name its sources, describe an extension to setup.py, load the op."""

from __future__ import annotations

import importlib
import logging
import os
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from . import jit

if TYPE_CHECKING:
    from setuptools import Extension

logger = logging.getLogger("DeepSpeed")


class OpBuilder:
    """Base of the builders: a subclass names its op, its sources and its flags."""

    NAME: ClassVar[str] = ""
    BUILD_VAR: ClassVar[str] = ""  # set to 1, it makes setup.py compile the op at install
    PREBUILT: ClassVar[str] = ""  # module that such an install leaves
    SOURCES: ClassVar[tuple[str, ...]] = ()  # below csrc/

    def absolute_name(self) -> str:
        """Returns the import name of the op when it was compiled at install."""
        return self.PREBUILT

    def source_root(self) -> Path:
        """Returns the folder csrc/: beside this package in a checkout and in a wheel alike."""
        return self._ops_root() / "csrc"

    def sources(self) -> list[str]:
        """Returns absolute paths of the files to compile."""
        return [str(self.source_root() / name) for name in self.SOURCES]

    def cxx_args(self) -> list[str]:
        """Returns compiler flags."""
        return []

    def ld_args(self) -> list[str]:
        """Returns linker flags."""
        return []

    def _ops_root(self) -> Path:
        """Returns the folder that holds this package: deepspeed/ops, or the root of a checkout."""
        return Path(__file__).parent.parent

    def is_prebuilt(self) -> bool:
        """Returns whether the op was compiled at install. Imports nothing."""
        relative = self.PREBUILT.removeprefix("deepspeed.ops.").replace(".", "/")
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        return bool(self.PREBUILT) and (self._ops_root() / f"{relative}{suffix}").exists()

    def is_compatible(self, verbose: bool = False) -> bool:
        """Returns whether the op is compiled already, or this machine has what compiling takes."""
        try:
            if not self.is_prebuilt():
                jit.find_compiler()
        except RuntimeError as error:
            if verbose:
                logger.warning("%s", error)
            return False
        return True

    def builder(self) -> Extension:
        """Returns the extension for setup.py, which must run in the folder that holds csrc/.

        Use it with `cmdclass={"build_ext": torch.utils.cpp_extension.BuildExtension}`.
        """
        from torch.utils.cpp_extension import CppExtension

        return CppExtension(
            name=self.PREBUILT,
            sources=[os.path.relpath(path) for path in self.sources()],
            extra_compile_args=self.cxx_args(),
            extra_link_args=self.ld_args(),
        )

    def load(self, verbose: bool = False) -> ModuleType:
        """Returns the op: compiled at install, else from the cache, else compiled now.

        Args:
            verbose: show the compiler's output.

        Raises:
            RuntimeError: the op does not compile here; the message holds the compiler's first error.
        """
        if self.is_prebuilt():
            try:
                return importlib.import_module(self.PREBUILT)
            except ImportError as error:
                logger.warning(
                    "%s: expected the module compiled at install to fit this torch, got: %s. "
                    "Compiling it for this one; reinstall to avoid that.",
                    self.NAME,
                    error,
                )
        return self.jit_load(verbose)

    def jit_load(self, verbose: bool = False) -> ModuleType:
        """Returns the op from the cache, compiled first if need be. Raises as `load`."""
        recipe = jit.Recipe(self.NAME, tuple(self.sources()), tuple(self.cxx_args()), tuple(self.ld_args()))
        return jit.load(recipe, verbose)
