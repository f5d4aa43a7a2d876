"""Compiling an op at first use, once for all processes that share a cache.

A finished build is a folder `<name>_<key>` in the cache, put there by one rename: it is whole or absent. The
key covers everything the binary depends on, so a cache may be shared by environments and machines. Builders
take a file lock that the system drops with its holder: a killed build leaves nothing to wait for. Where a
file system has no locks, builders work side by side, and the first rename wins.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

logger = logging.getLogger("DeepSpeed")

_COMPILERS = ("c++", "g++", "clang++")
_ABANDONED_AFTER_S = 3600.0
_ERROR_LINE = re.compile(r"\b(fatal )?error\b|undefined reference|cannot find|No space left", re.IGNORECASE)


class Recipe(NamedTuple):
    """Everything given to the compiler."""

    name: str
    sources: tuple[str, ...]
    cxx_args: tuple[str, ...]
    ld_args: tuple[str, ...]


def load(recipe: Recipe, verbose: bool = False) -> ModuleType:
    """Returns the compiled module of a recipe, from the cache if it is there.

    Args:
        recipe: what to compile.
        verbose: show the compiler's output.

    Raises:
        RuntimeError: no compiler, no ninja, or the compiler failed.
    """
    compiler = find_compiler()
    name = f"{recipe.name}_{cache_key(recipe, compiler)}"
    if name in sys.modules:
        return sys.modules[name]
    folder = cache_root() / name
    if not folder.exists():
        with _build_lock(folder):
            if not folder.exists():
                _build(recipe, name, folder, compiler, verbose)
    return _import_extension(name, folder)


def find_compiler() -> str:
    """Returns the path of the C++ compiler: CXX, else the first of c++, g++, clang++.

    Raises:
        RuntimeError: there is none.
    """
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else _COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise RuntimeError(
        f"CXX: expected a C++17 compiler, got {asked or 'none of ' + ', '.join(_COMPILERS) + ' on PATH'}. "
        "Install g++ (for example: apt-get install g++), or set CXX to a compiler."
    )


def cache_root() -> Path:
    """Returns where finished builds go: TORCH_EXTENSIONS_DIR, else torch_extensions in the user's cache."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"


def cache_key(recipe: Recipe, compiler: str) -> str:
    """Returns a hash of sources and headers, flags, compiler, torch, Python and architecture."""
    import torch

    digest = hashlib.sha256()
    folders = {Path(source).parent for source in recipe.sources}
    for path in sorted(
        path for folder in folders for path in folder.iterdir() if path.suffix in (".cpp", ".h")
    ):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    facts = (
        recipe.cxx_args,
        recipe.ld_args,
        _compiler_identity(compiler),
        torch.__version__,
        sysconfig.get_config_var("EXT_SUFFIX"),
        platform.machine(),
    )
    digest.update(repr(facts).encode())
    return digest.hexdigest()[:16]


def _compiler_identity(compiler: str) -> str:
    try:
        result = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(
            f"CXX: expected a C++17 compiler, got {compiler} ({error}). Install g++, or set CXX to one."
        ) from None
    return compiler + "\n" + result.stdout


@contextlib.contextmanager
def _build_lock(folder: Path) -> Iterator[None]:
    """Holds the lock of one cache entry, or none where the file system cannot lock."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise RuntimeError(
            f"TORCH_EXTENSIONS_DIR: expected a folder that can be written, got {folder.parent} ({error}). "
            "Set it to one on a disk with space."
        ) from None
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _build(recipe: Recipe, name: str, folder: Path, compiler: str, verbose: bool) -> None:
    """Compiles into a temporary folder beside the cache entry, then renames it."""
    logger.info("Compiling %s into %s: once, some 15 s", recipe.name, folder)
    _remove_abandoned(folder)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _compile(recipe, name, work, compiler, verbose)
        for path in work.glob("*.o"):
            path.unlink()
        work.chmod(0o755)
        try:
            work.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Removes what killed builds left. Only old folders: without locks another builder may be at work."""
    for path in folder.parent.glob(f".{folder.name}.*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)


def _compile(recipe: Recipe, name: str, work: Path, compiler: str, verbose: bool) -> None:
    try:
        # Not at the top: importing it needs setuptools, and a finished build needs neither.
        from torch.utils import cpp_extension
    except ImportError as error:
        raise RuntimeError(
            f"{recipe.name}: expected setuptools, which torch compiles with, got: {error}. "
            "Run pip install setuptools."
        ) from None
    with _build_environment(compiler):
        if shutil.which("ninja") is None:
            raise RuntimeError(
                f"{recipe.name}: expected the build tool ninja, got none. "
                "Run pip install ninja (it needs no root rights)."
            )
        try:
            cpp_extension.load(
                name=name,
                sources=list(recipe.sources),
                extra_cflags=list(recipe.cxx_args),
                extra_ldflags=list(recipe.ld_args),
                build_directory=str(work),
                with_cuda=False,
                verbose=verbose,
                is_python_module=False,
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise RuntimeError(
                f"{recipe.name}: expected {compiler} to compile the op, got: {first_error(str(error))}\n"
                "Install g++ 9 or newer, or set CXX to such a compiler."
            ) from None


@contextlib.contextmanager
def _build_environment(compiler: str) -> Iterator[None]:
    """Names the compiler to torch, and finds a ninja from pip although its environment is not activated."""
    saved = {key: os.environ.get(key) for key in ("CXX", "PATH")}
    folders = [saved["PATH"] or os.defpath, str(Path(sys.executable).parent)]
    if importlib.util.find_spec("ninja") is not None:
        folders.append(str(getattr(importlib.import_module("ninja"), "BIN_DIR", "")))
    os.environ.update(CXX=compiler, PATH=os.pathsep.join(folder for folder in folders if folder))
    try:
        yield
    finally:
        for key, value in saved.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def first_error(output: str) -> str:
    """Returns the first error in a compiler's output, with the source lines that it quotes.

    Args:
        output: everything the build printed.
    """
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if i > 0 and _ERROR_LINE.search(line)), None)
    if start is None:
        return "\n".join(lines[:4])
    end = start + 1
    while end < len(lines) and end < start + 4 and lines[end].startswith(" "):
        end += 1
    return "\n".join(lines[start:end])


def _import_extension(name: str, folder: Path) -> ModuleType:
    path = folder / f"{name}.so"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise RuntimeError(f"{name}: expected {path} to load, got: {error}. Remove {folder}.") from None
    sys.modules[name] = module
    return module
