"""The patch for stock as a distribution, its import hook and its command. Stock is not needed here."""

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile

import pytest

from tests.unit.source_tree import ROOT

PATCH = ROOT / "stock_patch"
PACKAGE = PATCH / "deepspeed_lean"
SHARED = {
    "csrc": "csrc",
    "op_builder": "op_builder",
    "host_buffer.py": "deepspeed/runtime/zero/host_buffer.py",
    "ring.py": "deepspeed/runtime/zero/ring.py",
    "host_threads.py": "deepspeed/ops/adam/host_threads.py",
}
# Stands for stock: says what is run, and has what a loader is asked for.
FAKE = """
import sys
print("deepspeed runs")
if "--broken" in sys.argv:
    raise OSError("no such library")
"""
# Takes the place of apply().
START = """
    import sys, deepspeed_lean
    from deepspeed_lean.autoload import install
    def apply():
        import deepspeed
        print("applied to", sys.modules["deepspeed"].__spec__.name, "deepspeed.late" in sys.modules)
    deepspeed_lean.apply = apply
    """


def files_that_are_shared():
    yield from (f"csrc/adam/{path.name}" for path in (ROOT / "csrc" / "adam").iterdir())
    yield from (f"op_builder/{path.name}" for path in (ROOT / "op_builder").glob("*.py"))
    yield from (name for name in SHARED if name.endswith(".py"))


def test_what_is_shared_is_linked_and_nothing_is_there_twice():
    links = {path.name: path.resolve() for path in PACKAGE.iterdir() if path.is_symlink()}
    assert links == {name: ROOT / target for name, target in SHARED.items()}
    elsewhere = {
        path.read_bytes() for folder in ("deepspeed", "op_builder", "csrc") for path in sources(folder)
    }
    assert not [path for path in sources("stock_patch") if path.read_bytes() in elsewhere]


def sources(folder):
    """Files with text in them that are no links, nor below one."""
    for top, _, names in os.walk(ROOT / folder):
        for name in names:
            path = ROOT / top / name
            if path.suffix in (".py", ".cpp", ".h") and not path.is_symlink() and path.stat().st_size:
                yield path


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what is needed, as git has it: a build leaves files in its folder."""
    target = tmp_path_factory.mktemp("checkout")
    left_out = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    for name in ("stock_patch", "csrc", "op_builder", "deepspeed"):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=left_out)
    shutil.copy(ROOT / "LICENSE", target)
    return target


def build_wheel(source, folder):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        source,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.startswith("deepspeed_lean_patch-")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_the_package_what_it_shares_and_the_startup_file(checkout, tmp_path):
    wheel = build_wheel(checkout / "stock_patch", tmp_path)
    own = {path.name for path in PACKAGE.glob("*.py")}
    expected = {f"deepspeed_lean/{name}" for name in [*own, *files_that_are_shared(), "py.typed"]}
    assert set(wheel) == expected | {"deepspeed_lean.pth"}
    for name, content in wheel.items():
        source = PATCH / name
        assert content == source.read_bytes()


def test_an_sdist_gives_the_same_wheel(checkout, tmp_path):
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=checkout / "stock_patch", check=True, timeout=120)
    (sdist,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path)
    wheels = [
        build_wheel(source, tmp_path / name)
        for name, source in (
            ("from_sdist", sdist.with_name(sdist.name.removesuffix(".tar.gz"))),
            ("from_tree", checkout / "stock_patch"),
        )
    ]
    assert wheels[0] == wheels[1]


@pytest.fixture
def python(tmp_path):
    """Runs a snippet or arguments where a package that stands for stock can be imported."""
    package = tmp_path / "path" / "deepspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE)
    (package / "late.py").write_text("")

    def run(*arguments, startup=False, **environment):
        if startup:
            shutil.copy(PATCH / "deepspeed_lean.pth", tmp_path / "path")
            arguments = ("-c", f"import site; site.addsitedir({str(package.parent)!r})\n" + arguments[0])
        path = os.pathsep.join((str(package.parent), str(PATCH)))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DEEPSPEED_")}
        return subprocess.run(
            [sys.executable, *arguments],
            env={**inherited, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def snippet(code):
    return textwrap.dedent(START) + textwrap.dedent(code)


def test_importing_the_package_imports_neither_torch_nor_deepspeed(python):
    done = python("-c", "import sys, deepspeed_lean; print({'torch', 'deepspeed'} & set(sys.modules))")
    assert done.stdout == "set()\n", done.stderr


def test_the_patch_is_applied_once_when_deepspeed_has_run(python):
    done = python(
        "-c",
        snippet("""
            install()
            install()
            import importlib.util
            # Who only asks whether it is there starts nothing, and may ask the loader things.
            found = importlib.util.find_spec("deepspeed")
            assert found.loader.get_filename("deepspeed") == found.origin
            from deepspeed.late import __name__ as late  # a submodule first
            import deepspeed, inspect
            for loader in (deepspeed.__loader__, deepspeed.__spec__.loader):
                assert type(loader).__name__ == "SourceFileLoader"
            assert "deepspeed runs" in inspect.getsource(deepspeed)
            del sys.modules["deepspeed"]
            install()
            import deepspeed
            print("again")
            """),
    )
    assert done.returncode == 0, done.stderr
    once = ["deepspeed runs", "applied to deepspeed False"]
    assert done.stdout.splitlines() == [*once, "deepspeed runs", "applied to deepspeed True", "again"]


def test_other_hooks_may_do_the_same(python):
    """Two hooks that each ask the import system for the module do not ask one another for ever."""
    done = python(
        "-c",
        snippet("""
            import importlib.util
            class Other:
                asked = False
                def find_spec(self, name, path=None, target=None):
                    if name == "deepspeed" and not self.asked:
                        self.asked = True
                        return importlib.util.find_spec(name)
            install()
            sys.meta_path.insert(1, Other())
            import deepspeed
            """),
    )
    assert done.stdout.splitlines() == ["deepspeed runs", "applied to deepspeed False"], done.stderr


def test_a_failed_import_stays_what_it_was_and_the_next_one_is_patched(python):
    done = python(
        "-c",
        snippet("""
            install()
            sys.argv.append("--broken")
            try:
                import deepspeed
            except OSError as error:
                print(error)
            sys.argv.pop()
            import deepspeed
            """),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *("deepspeed runs", "no such library"),
        *("deepspeed runs", "applied to deepspeed False"),
    ]


def test_a_failed_apply_fails_the_import_each_time_with_words_that_help(python):
    done = python(
        "-c",
        snippet("""
            def apply():
                raise ImportError("no such module")
            deepspeed_lean.apply = apply
            install()
            for _ in range(2):
                try:
                    import deepspeed
                except RuntimeError as error:
                    print(error)
            """),
    )
    assert done.stdout.splitlines() == 2 * [
        "deepspeed runs",
        "DEEPSPEED_LEAN: expected deepspeed_lean.apply() to patch this deepspeed, got ImportError: no such "
        "module. Unset DEEPSPEED_LEAN to go on without the patch.",
    ]


def test_the_environment_without_deepspeed_has_no_hook_in_the_way(python):
    done = python("-c", snippet("install()\nimport deepspeed_of_another_name"))
    assert "ModuleNotFoundError: No module named 'deepspeed_of_another_name'" in done.stderr


@pytest.mark.parametrize("value", ["", "0", None])
def test_the_startup_file_does_nothing_unless_it_is_asked_to(python, value):
    environment = {} if value is None else {"DEEPSPEED_LEAN": value}
    code = "import sys, deepspeed; print([name for name in sys.modules if name.startswith('deepspeed')])"
    done = python(code, startup=True, **environment)
    assert (done.stdout, done.stderr) == ("deepspeed runs\n['deepspeed']\n", "")


def test_the_startup_file_installs_the_hook_alone(python):
    code = "import sys; print({'deepspeed_lean.autoload', 'deepspeed', 'torch'} & set(sys.modules))"
    done = python(code, startup=True, DEEPSPEED_LEAN="1")
    assert (done.stdout, done.stderr) == ("{'deepspeed_lean.autoload'}\n", "")


def test_a_program_may_switch_off_before_it_imports_deepspeed(python):
    code = (
        "import os; os.environ['DEEPSPEED_LEAN'] = '0'; import deepspeed, sys; print(len(sys.meta_path) > 3)"
    )
    done = python("-c", snippet(f"install()\n{code}"))
    assert done.stdout == "deepspeed runs\nTrue\n", done.stderr


def test_a_value_without_meaning_is_an_error_where_deepspeed_is_imported(python):
    done = python("print('starts')\nimport deepspeed", startup=True, DEEPSPEED_LEAN="yes")
    assert done.stdout == "starts\n"
    assert done.stderr.splitlines()[-1] == (
        "ValueError: DEEPSPEED_LEAN: expected 1, 0 or nothing, got 'yes'. Correct or unset it."
    )


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        ([], "a script, or -m and a module, got nothing"),
        (["-m"], "a script, or -m and a module, got nothing"),
        (["--help"], "a script, or -m and a module, got --help"),
        (["absent.py"], "a script that exists, got absent.py"),
    ],
)
def test_the_command_says_how_it_is_used(python, arguments, got):
    done = python("-m", "deepspeed_lean", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    usage, error = done.stderr.splitlines()
    assert usage == "usage: python -m deepspeed_lean (script.py | -m module) [arguments ...]"
    assert error == f"deepspeed_lean: expected {got}."


def test_the_command_runs_a_module(python, tmp_path):
    (tmp_path / "job.py").write_text("import sys; print(__name__, __spec__.name, sys.argv)")
    code = snippet("from deepspeed_lean.__main__ import main; main(['-m', 'job', '-x'])")
    done = python("-c", code)
    assert done.stdout.splitlines()[2:] == [f"__main__ job {[str(tmp_path / 'job.py'), '-x']}"], done.stderr


def test_the_readme_explains_every_switch():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (switches,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "SWITCHES"
    ]
    readme = (PATCH / "README.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", readme, re.MULTILINE) == list(switches)
