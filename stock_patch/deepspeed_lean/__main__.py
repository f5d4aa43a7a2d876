"""Runs a program on patched stock DeepSpeed: `python -m deepspeed_lean train.py arguments ...`."""

from __future__ import annotations

import os
import runpy
import sys

import deepspeed_lean

_USAGE = "usage: python -m deepspeed_lean (script.py | -m module) [arguments ...]"


def main(arguments: list[str]) -> None:
    """Apply the patch and run a script or module as `__main__`, as Python itself would.

    Processes that it starts are patched as well: they inherit DEEPSPEED_LEAN=1.

    Args:
        arguments: the script's path, or "-m" and the module's name; behind it the program's own arguments.

    Raises:
        SystemExit: there is nothing to run.
    """
    as_module = arguments[:1] == ["-m"]
    program = arguments[1:] if as_module else arguments
    if not program or program[0].startswith("-"):
        raise SystemExit(_fail("a script, or -m and a module", program[0] if program else "nothing"))
    if not as_module and not os.path.exists(program[0]):
        raise SystemExit(_fail("a script that exists", program[0]))
    os.environ["DEEPSPEED_LEAN"] = "1"
    deepspeed_lean.apply()
    sys.argv[:] = program
    if as_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return
    # Python puts the script's folder where it has put the current one for us.
    if os.path.isfile(program[0]) and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
    runpy.run_path(program[0], run_name="__main__")


def _fail(expected: str, got: str) -> int:
    """Says how the command is used; returns the exit code."""
    print(f"{_USAGE}\ndeepspeed_lean: expected {expected}, got {got}.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main(sys.argv[1:])
