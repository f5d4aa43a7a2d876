"""Three ways to switch the patch on, what is left out, and stock untouched without it."""

import pytest

from tests.stock import harness

pytestmark = harness.MARKS

# Without a GPU there is nothing to pin.
ON_CPU = ["host_buffers", "adam_op", "unscale", "staging", "accumulator", "temporary"]

# A submodule first, as clients do it: stock's package is imported on the way.
LOOK = """
    import sys
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    import deepspeed, deepspeed.runtime.engine
    report({
        "ours in the optimizer": any(
            base.__module__.startswith("deepspeed_lean") for base in DeepSpeedZeroOptimizer.__mro__),
        "the engine has it": deepspeed.runtime.engine.DeepSpeedZeroOptimizer is DeepSpeedZeroOptimizer,
        "loaded": sorted(name for name in sys.modules if name.startswith("deepspeed_lean")),
        "applied": list(sys.modules["deepspeed_lean"].applied()) if "deepspeed_lean" in sys.modules else None,
        "loader": type(deepspeed.__spec__.loader).__name__,
        "finders": [type(finder).__module__ for finder in sys.meta_path],
    })
    """
WITHOUT_DEEPSPEED = """
    import sys
    report([name for name in ("torch", "deepspeed") if name in sys.modules])
    """
SCRIPT = """
import json, os, subprocess, sys
import neighbour
child = "import sys; print('deepspeed_lean.autoload' in sys.modules, 'torch' in sys.modules)"
print("RESULT " + json.dumps({
    "arguments": sys.argv[1:],
    "name": __name__,
    "neighbour": neighbour.VALUE,
    "child": subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.split(),
    "applied": sys.modules["deepspeed_lean"].applied(),
}))
"""
BY_HAND = """
    import deepspeed, deepspeed_lean
    from deepspeed.runtime.zero import stage_1_and_2 as stock
    own = stock.DeepSpeedZeroOptimizer
    off = {"staging": False, "pinning": False}
    found = [deepspeed_lean.applied(), deepspeed_lean.apply(**off), deepspeed_lean.applied()]
    patched = stock.DeepSpeedZeroOptimizer
    # Once more puts nothing on top of what is there.
    found += [deepspeed_lean.apply(**off), stock.DeepSpeedZeroOptimizer.__bases__ == patched.__bases__]
    deepspeed_lean.revert()
    found += [patched is own, stock.DeepSpeedZeroOptimizer is own, deepspeed_lean.applied()]
    report(found)
    """
TRAIN = """
    import os, torch
    torch.distributed.init_process_group("gloo")
    import deepspeed
    from peer_job import Job, make_engine, spare_stock, train
    spare_stock(deepspeed)
    engine = make_engine(Job(), deepspeed)
    bases = [base.__module__.partition(".")[0] for base in type(engine.optimizer).__mro__]
    report([bases, train(engine, 3, int(os.environ["RANK"]))])
    engine.destroy()
    leave()
    """
OP = """
    import sys, torch
    from deepspeed_lean.op_builder import CPUAdamBuilder
    builder = CPUAdamBuilder()
    op = builder.load()
    sums = op.sum_of_squares(torch.arange(4.0), 1)
    report([builder.is_prebuilt(), str(builder.source_root()), sums, "deepspeed" in sys.modules])
    """


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("VALUE = 7")
    return tmp_path / "train.py"


@pytest.mark.parametrize("value", [None, "0"])
def test_installed_but_not_switched_on_stock_is_untouched(value):
    (seen,) = harness.results(LOOK, environment={} if value is None else {"DEEPSPEED_LEAN": value})
    assert not seen["ours in the optimizer"]
    assert seen["loaded"] == []
    assert not [module for module in seen["finders"] if "deepspeed" in module]


def test_the_environment_switches_on():
    (seen,) = harness.results(LOOK, environment={"DEEPSPEED_LEAN": "1"})
    assert seen["applied"] == ON_CPU
    assert seen["ours in the optimizer"]
    assert seen["the engine has it"]
    # The hook has gone, and stock's module looks as if it had been imported without.
    assert seen["loader"] == "SourceFileLoader"
    assert not [module for module in seen["finders"] if "deepspeed" in module]


def test_ranks_train_on_the_patched_optimizer():
    for bases, losses in harness.results(TRAIN, world=2, environment={"DEEPSPEED_LEAN": "1"}):
        assert bases.index("deepspeed_lean") < len(bases) - 1 - bases[::-1].index("deepspeed")
        assert len(losses) == 3
        assert all(0 < loss < 10 for loss in losses)


def test_a_process_without_deepspeed_imports_nothing():
    assert harness.results(WITHOUT_DEEPSPEED, environment={"DEEPSPEED_LEAN": "1"}) == [[]]


def test_the_command_runs_a_script_as_python_would(script):
    (seen,) = harness.results(script, "--lr", "1", "-m", through=("-m", "deepspeed_lean"))
    assert seen == {
        "arguments": ["--lr", "1", "-m"],
        "name": "__main__",
        "neighbour": 7,
        "child": ["True", "False"],  # will be patched when it imports deepspeed
        "applied": ON_CPU,
    }


def test_a_program_applies_and_reverts():
    (seen,) = harness.results(BY_HAND)
    some = [name for name in ON_CPU if name != "staging"]
    assert seen == [[], some, some, some, True, False, True, []]


def test_switches_are_left_out_by_the_environment():
    environment = {"DEEPSPEED_LEAN": "1", "DEEPSPEED_LEAN_OFF": "staging,pinning"}
    (seen,) = harness.results(LOOK, environment=environment)
    assert seen["applied"] == [name for name in ON_CPU if name != "staging"]


def test_an_unknown_switch_is_an_error():
    environment = {"DEEPSPEED_LEAN": "1", "DEEPSPEED_LEAN_OFF": "staging,pining"}
    (ended,) = harness.run("import deepspeed", environment=environment)
    assert ended.code == 1
    assert "ValueError: DEEPSPEED_LEAN_OFF: expected" in ended.stderr
    assert "pining" in ended.stderr.splitlines()[-1]


def test_the_log_names_each_replacement():
    (ended,) = harness.run("import deepspeed", environment={"DEEPSPEED_LEAN": "1"})
    log = ended.stdout + ended.stderr
    assert not [name for name in ON_CPU if name not in log], log


def test_the_op_compiles_from_the_installed_package():
    (seen,) = harness.results(OP)
    prebuilt, sources, sums, stock_imported = seen
    assert not prebuilt
    assert sources.endswith("site-packages/deepspeed_lean/csrc")
    assert sums == 14.0
    assert not stock_imported
