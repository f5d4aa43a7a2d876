"""The kernels under sanitizers, as csrc/tests/test_kernels.cpp: a program without torch or Python."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[3] / "csrc"
SOURCES = [CSRC / "adam" / name for name in ("adam_queue.cpp", "dispatch.cpp", "rollback.cpp")]
SOURCES += sorted((CSRC / "adam").glob("kernels_*.cpp"))
SOURCES.append(CSRC / "tests" / "test_kernels.cpp")
FLAGS = ("-std=c++17", "-O1", "-g", "-fopenmp", "-ffp-contract=off", "-fno-math-errno")
# gcc's libgomp synchronises by futex, unseen by ThreadSanitizer; LLVM's OpenMP tells it through this tool.
ARCHER = [path for root in ("/usr/lib", "/usr/lib64") for path in Path(root).glob("llvm*/lib/libarcher.so")]


def build(compiler, sanitizer, folder):
    """Returns the program, or skips where the compiler has no such sanitizer."""
    program, probe = folder / "test_kernels", folder / "probe.cpp"
    probe.write_text("int main() {}\n")
    sanitize = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    command = [compiler, *sanitize, "-fopenmp", str(probe), "-o", str(folder / "probe")]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{compiler} has no {sanitizer} sanitizer here")
    subprocess.run([compiler, *FLAGS, *sanitize, *map(str, SOURCES), "-o", str(program)], check=True)
    return program


def run(program, **environment):
    result = subprocess.run(
        [str(program)], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "scalar: checked" in result.stdout
    assert result.stdout.endswith("0 differences\n")


def test_kernels_stay_in_bounds_and_defined(tmp_path):
    run(build("g++", "address,undefined", tmp_path))


def test_kernel_threads_do_not_race(tmp_path):
    compiler = shutil.which("clang++")
    if compiler is None or not ARCHER:
        pytest.skip("needs clang++ with its OpenMP runtime (apt-get install clang libomp-dev)")
    program = build(compiler, "thread", tmp_path)
    run(program, OMP_TOOL_LIBRARIES=str(ARCHER[0]), TSAN_OPTIONS="ignore_noninstrumented_modules=1")
