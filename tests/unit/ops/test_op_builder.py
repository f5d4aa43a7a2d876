"""Building ops: one builder, an atomic cache, clear errors, and never CUDA.

Most tests compile a toy of a few lines in place of the real op, which takes a hundred times as long.
"""

import fcntl
import multiprocessing
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from deepspeed.ops.op_builder import ALL_BUILDERS, CPUAdamBuilder, jit

TOY = """
#include <Python.h>
#define JOIN_AGAIN(a, b) a##b
#define JOIN(a, b) JOIN_AGAIN(a, b)
#define TEXT_AGAIN(a) #a
#define TEXT(a) TEXT_AGAIN(a)
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, TEXT(TORCH_EXTENSION_NAME), nullptr, -1};
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)() {
    PyObject* module = PyModule_Create(&definition);
    PyModule_AddIntConstant(module, "answer", ANSWER);
    return module;
}
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A recipe of one small file, and an empty cache."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    source = tmp_path / "toy.cpp"
    source.write_text(f"// {tmp_path}: a key that no other test has loaded\n{TOY}")
    return jit.Recipe("toy", (str(source),), ("-DANSWER=42",), ())


def entries():
    root = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def executable(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_real_op_compiles_from_nothing_whatever_cuda_says(tmp_path):
    """An empty cache, a CUDA_HOME whose nvcc fails loudly, and flags for an older processor."""
    cuda = tmp_path / "cuda"
    (cuda / "bin").mkdir(parents=True)
    executable(cuda / "bin" / "nvcc", "#!/bin/sh\necho 'release 7.5, V7.5.17' >&2\ntouch $0.called\nexit 9\n")
    environment = {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"),
        "CUDA_HOME": str(cuda),
        "CUDA_PATH": str(cuda),
        "CXXFLAGS": "-march=x86-64",
        "CFLAGS": "-march=x86-64",
    }
    code = """
        import torch
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        param = torch.nn.Parameter(torch.ones(1024, dtype=torch.bfloat16))
        optimizer = DeepSpeedCPUAdam([param], lr=0.1)
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert (param < 1).all()
        """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert not (cuda / "bin" / "nvcc.called").exists()


def test_a_finished_build_needs_neither_ninja_nor_a_second_compilation(toy, monkeypatch):
    first = jit.load(toy)
    assert first.answer == 42
    monkeypatch.delitem(sys.modules, first.__name__)
    monkeypatch.setattr(jit, "_build", None)
    assert jit.load(toy).answer == 42
    assert jit.load(toy) is jit.load(toy)


def test_key_follows_sources_headers_flags_compiler_and_architecture(toy, tmp_path, monkeypatch):
    compiler = jit.find_compiler()
    keys = [jit.cache_key(toy, compiler)]
    keys.append(jit.cache_key(toy._replace(cxx_args=("-DANSWER=43",)), compiler))
    keys.append(jit.cache_key(toy._replace(ld_args=("-lm",)), compiler))
    other = executable(tmp_path / "g++", "#!/bin/sh\necho other compiler 99\n")
    keys.append(jit.cache_key(toy, other))
    (tmp_path / "toy.h").write_text("// a header")
    keys.append(jit.cache_key(toy, compiler))
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    keys.append(jit.cache_key(toy, compiler))
    assert len(set(keys)) == len(keys)


def test_two_sets_of_flags_make_two_cache_entries(toy):
    assert jit.load(toy).answer == 42
    assert jit.load(toy._replace(cxx_args=("-DANSWER=43", "-march=x86-64"))).answer == 43
    assert len(entries()) == 2


def load_in_child(recipe, barrier, answers):
    barrier.wait()
    answers.put(jit.load(recipe).answer)


def test_processes_that_start_together_on_an_empty_cache_all_load_one_build(toy):
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(3), context.Queue()
    children = [context.Process(target=load_in_child, args=(toy, barrier, answers)) for _ in range(3)]
    for child in children:
        child.start()
    assert [answers.get(timeout=120) for _ in children] == [42, 42, 42]
    for child in children:
        child.join()
    assert len(entries()) == 1, "no temporary folder is left"


def test_builders_without_a_working_lock_all_succeed(toy, monkeypatch):
    """The file system cannot lock, and another builder finished first: its build is taken."""

    def refuse(handle, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    compile_toy = jit._compile

    def compile_twice(recipe, name, work, *rest):
        compile_toy(recipe, name, work, *rest)
        winner = work.parent / name
        winner.mkdir()
        (winner / f"{name}.so").write_bytes((work / f"{name}.so").read_bytes())

    monkeypatch.setattr(jit, "_compile", compile_twice)
    assert jit.load(toy).answer == 42
    assert len(entries()) == 1


def test_what_a_killed_build_leaves_neither_hangs_nor_spoils_the_next(toy):
    """A lock file nobody holds, a half-written temporary folder of long ago, and one of just now."""
    compiler = jit.find_compiler()
    name = f"toy_{jit.cache_key(toy, compiler)}"
    root = jit.cache_root()
    for leftover, age_s in ((f".{name}.old", 10_000), (f".{name}.new", 0)):
        (root / leftover).mkdir(parents=True)
        (root / leftover / "lock").touch()
        (root / leftover / f"{name}.so").write_text("half")
        stamp = (root / leftover).stat().st_mtime - age_s
        os.utime(root / leftover, (stamp, stamp))
    (root / f"{name}.lock").touch()
    assert jit.load(toy).answer == 42
    assert entries() == [f".{name}.new", name]


def test_failed_build_shows_the_compilers_first_error_once_and_leaves_no_entry(toy):
    broken = toy._replace(cxx_args=())  # ANSWER is not declared
    with pytest.raises(
        RuntimeError, match=r"^toy: expected .* to compile the op, got: .*error: .*ANSWER"
    ) as error:
        jit.load(broken)
    assert str(error.value).count("error:") == 1
    assert error.value.__suppress_context__
    assert "Install g++" in str(error.value)
    assert entries() == []
    assert jit.load(toy).answer == 42, "the next attempt is not spoiled"


def test_failed_build_of_the_optimizer_says_it_once_with_nothing_from_a_destructor(tmp_path):
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": "/bin/false"}
    code = "import torch, deepspeed\nfrom deepspeed.ops.adam import DeepSpeedCPUAdam\n"
    code += "DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(3))])"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.count("cpu_adam: expected /bin/false to compile the op") == 1
    assert result.stderr.count("Traceback") == 1
    assert "Exception ignored" not in result.stderr


def test_missing_compiler_is_an_error_that_names_the_package(toy, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        RuntimeError, match=r"^CXX: expected a C\+\+17 compiler, got no-such-compiler\. Install g\+\+"
    ):
        jit.load(toy)
    assert not CPUAdamBuilder().is_compatible()


def test_missing_ninja_is_an_error_that_names_the_pip_package(toy, monkeypatch):
    which = jit.shutil.which
    monkeypatch.setattr(jit.shutil, "which", lambda name: None if name == "ninja" else which(name))
    with pytest.raises(
        RuntimeError, match="^toy: expected the build tool ninja, got none. Run pip install ninja"
    ):
        jit.load(toy)


def test_ninja_of_an_environment_that_is_not_activated_is_found(toy, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert jit.load(toy).answer == 42
    assert os.environ["PATH"] == "/usr/bin:/bin"


def test_cache_that_cannot_be_written_is_an_error_that_names_the_variable(toy, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(RuntimeError, match="^TORCH_EXTENSIONS_DIR: expected a folder that can be written"):
        jit.load(toy)


def test_first_error_is_found_in_what_the_build_printed():
    output = """Error building extension 'toy': [1/2] c++ -c toy.cpp
    FAILED: toy.o
    c++ -DERROR=1 -c toy.cpp
toy.cpp: In function 'int f()':
toy.cpp:3:5: error: 'x' was not declared
    3 |     x = 1;
      |     ^
toy.cpp:4:5: error: 'y' was not declared
ninja: build stopped: subcommand failed.
"""
    expected = "toy.cpp:3:5: error: 'x' was not declared\n    3 |     x = 1;\n      |     ^"
    assert jit.first_error(output) == expected
    assert jit.first_error("nothing\nuseful") == "nothing\nuseful"


def test_importing_the_builders_needs_no_torch_and_no_deepspeed():
    code = "import sys, op_builder; assert not {'torch', 'deepspeed'} & set(sys.modules)"
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_sources_lie_beside_the_builders_in_both_places():
    assert all(Path(path).is_file() for path in CPUAdamBuilder().sources())
    assert [builder.NAME for builder in ALL_BUILDERS] == ["async_io", "cpu_adam"]


def test_extension_for_setup_names_relative_sources(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])
    extension = CPUAdamBuilder().builder()
    assert extension.name == CPUAdamBuilder().absolute_name() == "deepspeed.ops.adam.cpu_adam_op"
    assert extension.sources
    assert all(not os.path.isabs(source) and os.path.isfile(source) for source in extension.sources)
