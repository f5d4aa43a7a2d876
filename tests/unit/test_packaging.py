"""The wheel holds what a user needs: package, sources of the op, its builder, commands."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.unit.source_tree import ROOT


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the repository: a build leaves files in its folder."""
    target = tmp_path_factory.mktemp("checkout") / "repo"
    target.mkdir()
    for name in (
        "deepspeed",
        "op_builder",
        "csrc",
        "setup.py",
        "pyproject.toml",
        "MANIFEST.in",
        "LICENSE",
        "README.md",
    ):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        elif source.exists():
            shutil.copy(source, target / name)
    return target


def build(checkout, folder, **environment):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        ".",
    ]
    return subprocess.run(
        command,
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


def test_the_wheel_holds_package_sources_builder_and_commands(checkout, tmp_path):
    done = build(checkout, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == "deepspeed-0.19.8+lean.0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (commands,) = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "deepspeed").rglob("*.py")}
    sources = {
        f"deepspeed/ops/csrc/{path.relative_to(ROOT / 'csrc')}" for path in (ROOT / "csrc" / "adam").iterdir()
    }
    builder = {f"deepspeed/ops/op_builder/{path.name}" for path in (ROOT / "op_builder").glob("*.py")}
    assert sources
    assert builder
    assert not (package | sources | builder | {"deepspeed/py.typed"}) - names
    assert not [name for name in names if name.startswith(("tests", "op_builder", "csrc"))]
    assert "deepspeed = deepspeed.launcher.runner:main" in commands
    assert "ds_report = deepspeed.env_report:main" in commands


def test_compiling_at_install_without_torch_says_what_to_do(checkout, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    done = build(checkout, tmp_path, DS_BUILD_CPU_ADAM="1", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "DS_BUILD_CPU_ADAM: expected torch in the build environment" in done.stdout + done.stderr
