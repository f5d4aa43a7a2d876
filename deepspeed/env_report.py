"""The ``ds_report`` command: versions, compiler, vector level, and which ops build here."""

from __future__ import annotations

import argparse
import contextlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import ALL_BUILDERS, CPUAdamBuilder, OpBuilder

__all__ = ["main"]

_WIDTH = 34


def main(args: Sequence[str] | None = None) -> None:
    """Print the report.

    Args:
        args: Words after the program's name; the process's own by default.
    """
    parser = argparse.ArgumentParser(
        prog="ds_report", description="Reports what DeepSpeed finds on this machine."
    )
    parser.add_argument("--hide_operator_status", action="store_true", help="do not try to build the ops")
    parser.add_argument(
        "--hide_errors_and_warnings", action="store_true", help="do not show why an op does not build"
    )
    options = parser.parse_args(args)
    if not options.hide_operator_status:
        print(_section("DeepSpeed C++ op report"))
        print("\n".join(_op_lines(not options.hide_errors_and_warnings)))
    print(_section("DeepSpeed general environment info"))
    print("\n".join(_row(name, value) for name, value in _facts()))


def _section(title: str) -> str:
    return f"{'-' * 60}\n{title}:"


def _row(name: str, value: str) -> str:
    return f"{name} {'.' * (_WIDTH - len(name))} {value}"


def _op_lines(show_errors: bool) -> Iterator[str]:
    """Yield a line for each op. An op that is not in the cache yet is compiled.

    Only that shows that it builds.
    """
    for builder_class in ALL_BUILDERS:
        builder = builder_class()
        error = _why_not_built(builder)
        state = "built at install" if builder.is_prebuilt() else "builds at first use"
        yield _row(builder.NAME, state if error is None else "not available")
        if error is not None and show_errors:
            yield f"    {error}"


def _why_not_built(builder: OpBuilder) -> str | None:
    try:
        builder.load()
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    return None


def _facts() -> Iterator[tuple[str, str]]:
    yield "deepspeed version", deepspeed.__version__
    yield "deepspeed install path", str(Path(deepspeed.__file__).parent)
    yield "torch version", torch.__version__
    yield "torch install path", str(Path(torch.__file__).parent)
    yield "torch CUDA version", str(torch.version.cuda)
    yield "Python version", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    yield "accelerator", _accelerator()
    yield "C++ compiler", _or_problem(_compiler)
    yield "vector level", _or_problem(lambda: str(CPUAdamBuilder().load().simd_level()))
    yield "shared memory (/dev/shm) size", _shared_memory()


def _or_problem(fact: Callable[[], str]) -> str:
    try:
        return fact()
    except RuntimeError as error:
        return "unknown: " + str(error).splitlines()[0]


def _accelerator() -> str:
    accelerator = get_accelerator()
    return f"{accelerator.device_name()}, {accelerator.device_count()} visible"


def _compiler() -> str:
    from deepspeed.ops.op_builder import jit

    path = jit.find_compiler()
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return f"{path}: {version.splitlines()[0] if version else 'no version'}"


def _shared_memory() -> str:
    with contextlib.suppress(OSError):
        return f"{shutil.disk_usage('/dev/shm').total / 2**30:.2f} GiB"
    return "none"


if __name__ == "__main__":
    main()
