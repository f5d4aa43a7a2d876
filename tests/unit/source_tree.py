"""The repository's Python and C++ files, for tests about the source itself."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PYTHON_ROOTS = (
    "deepspeed",
    "op_builder",
    "stock_patch/deepspeed_lean",
    "stock_patch/setup.py",
    "tests",
    "benchmarks",
    "examples",
    "setup.py",
)
_CPP_ROOTS = ("csrc",)


def python_files() -> list[Path]:
    return sorted(path for root in _PYTHON_ROOTS for path in _files(root, (".py",)))


def package_files() -> list[Path]:
    return [path for path in python_files() if relative(path).split("/")[0] in ("deepspeed", "op_builder")]


def patch_files() -> list[Path]:
    """The files of the patch for stock that are its own."""
    return [path for path in python_files() if relative(path).startswith("stock_patch/deepspeed_lean/")]


def cpp_files() -> list[Path]:
    return sorted(path for root in _CPP_ROOTS for path in _files(root, (".cpp", ".h")))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def functions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function with its dotted name inside the file."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
            yield from functions(node, prefix + node.name + ".<locals>.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, prefix + node.name + ".")
        else:
            yield from functions(node, prefix)


def classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def docstring_line_count(node: ast.AST) -> int:
    """Count the lines of a function's docstring."""
    first = node.body[0]
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return first.end_lineno - first.lineno + 1
    return 0


def _files(root: str, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Yield files below a folder, or the file itself; what links lead to is counted where it is."""
    top = ROOT / root
    if top.is_file():
        yield top
    for folder, subfolders, names in os.walk(top):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        paths = (Path(folder, name) for name in names if name.endswith(suffixes))
        yield from (path for path in paths if not path.is_symlink())
