"""Our csrc/adam in place of stock's: stock's builder compiles it, stock's Python trains on it."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from op_builder.cpu_adam import CPUAdamBuilder
from tests.stock_python import COMPILER, LIMIT_S, OPS, STOCK
from tests.unit.ops.reference import EPSILON

pytestmark = [
    pytest.mark.compat,
    pytest.mark.timeout(LIMIT_S),
    pytest.mark.skipif(STOCK is None, reason="set DS_STOCK_PYTHON to an interpreter with stock DeepSpeed"),
]

ROOT = Path(__file__).parents[2]
STEPS = 5
LR = 0.01
MODES = pytest.mark.parametrize("mode", ["adamw", "l2"])
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

# What a pull request changes in op_builder/cpu/cpu_adam.py: the files, and the flags. The rest of stock's
# package is as it is installed.
PULL_REQUEST = """
import sys
from deepspeed.ops.op_builder import CPUAdamBuilder

def cxx_args(self, before=CPUAdamBuilder.cxx_args):
    kept = [flag for flag in before(self) if not flag.startswith(("-march", "-mcpu", "-D__"))]
    return [*kept, "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]

CPUAdamBuilder.sources = lambda self: ["csrc/" + name for name in sys.argv[2:]]
CPUAdamBuilder.include_paths = lambda self: []
CPUAdamBuilder.cxx_args = cxx_args
"""
TRAIN = f"""
import sys, torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

def train(mode, dtype, take_step):
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(331, 5).to(dtype))
    optimizer = DeepSpeedCPUAdam([param], lr={LR}, weight_decay=0.1, adamw_mode=mode == "adamw")
    trace = [param.detach().clone()]
    grads = [torch.randn(331, 5).to(dtype) for _ in range({STEPS})]
    for grad in grads:
        param.grad = grad.clone()
        take_step(optimizer)
        trace.append(param.detach().clone())
    return param, optimizer, grads, trace

results = {{"file": DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(1))]).ds_opt_adam.__file__}}
for mode in ("adamw", "l2"):
    for dtype in (torch.float32, torch.bfloat16):
        _, optimizer, _, trace = train(mode, dtype, lambda optimizer: optimizer.step())
        results[mode, dtype, "step"] = trace
        (state,) = optimizer.state.values()
        results[mode, dtype, "moments"] = [state["exp_avg"], state["exp_avg_sq"]]
        param, optimizer, grads, trace = train(mode, dtype, lambda optimizer: optimizer.step_subgroup(0))
        results[mode, dtype, "step_subgroup"] = trace
        param.grad = grads[-1].clone()
        optimizer.rollback_subgroup(0)
        results[mode, dtype, "rollback"] = param.detach().clone()
        results[mode, dtype, "steps left"] = optimizer.state[0]["step"]
torch.save(results, sys.argv[1])
"""


def run_stock(code, path, **environment):
    own = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": "", "CXX": str(COMPILER), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [STOCK, "-c", code, str(path), *CPUAdamBuilder.SOURCES],
        env={**os.environ, **own, **environment},
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(path, weights_only=False) if path.exists() else done.stdout


def overlay(stock, folder):
    """Stock's package by links, with our files laid over its csrc/adam."""
    levels = ("deepspeed", "ops", "csrc", "adam", None)
    for level, below in zip(levels, levels[1:], strict=False):
        folder = folder / level
        folder.mkdir()
        for entry in stock.iterdir():
            if entry.name != below:
                (folder / entry.name).symlink_to(entry)
        stock = stock / below if below else stock
    for source in (ROOT / "csrc" / "adam").iterdir():
        (folder / source.name).unlink(missing_ok=True)
        (folder / source.name).symlink_to(source)


@pytest.fixture(scope="module")
def ours(stocks_ops, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours")
    where = "import importlib.util as u; print(u.find_spec('deepspeed').submodule_search_locations[0])"
    overlay(Path(run_stock(where, folder / "none").strip()), folder)
    return run_stock(
        PULL_REQUEST + TRAIN,
        folder / "results.pt",
        PYTHONPATH=str(folder),
        TORCH_EXTENSIONS_DIR=str(folder / "built"),
    )


@pytest.fixture(scope="module")
def stocks(stocks_ops, tmp_path_factory):
    path = tmp_path_factory.mktemp("stocks") / "results.pt"
    return run_stock(TRAIN, path, TORCH_EXTENSIONS_DIR=str(OPS))


def assert_within(actual, expected, bound, name):
    excess = ((actual.double() - expected.double()).abs() - bound).max().item()
    assert excess <= 0, f"{name}: {excess} beyond the bound"


def of_either_op(params, steps):
    """How far parameters of two implementations may be apart after a number of steps.

    Each step rounds twice in their own type, in different places. Stock computes bias corrections in fp32,
    where 0.999 is off by up to 2^-25: 3e-5 of 1 - beta2, half of it under the root, of changes up to 2 lr.
    """
    return steps * (EPSILON[params.dtype] * (params.double().abs() + LR) + 2 * LR * 1.5e-5)


def test_stocks_builder_compiles_our_sources_in_place_of_its_own(ours, stocks):
    assert "/built/" in ours["file"] and "/built/" not in stocks["file"]


@TYPES
@MODES
@pytest.mark.parametrize("call", ["step", "step_subgroup"])
def test_stocks_optimizer_computes_the_same_on_either_op(ours, stocks, call, mode, dtype):
    for step, (found, expected) in enumerate(
        zip(ours[mode, dtype, call], stocks[mode, dtype, call], strict=True)
    ):
        assert_within(found, expected, of_either_op(expected, step), f"after {step} steps")
    for found, expected in zip(ours[mode, dtype, "moments"], stocks[mode, dtype, "moments"], strict=True):
        # fp32 in either case; with L2 decay they hold the parameters' differences too.
        bound = STEPS * (2.0**-22 + 0.1 * EPSILON[dtype] * (mode == "l2")) * (1 + expected.double().abs())
        assert_within(found, expected, bound, "moments")


@TYPES
@MODES
def test_stocks_rollback_takes_a_step_back_on_our_op(ours, mode, dtype):
    before, after = ours[mode, dtype, "step_subgroup"][-2:]
    assert not torch.equal(before, after)
    bound = 2 * EPSILON[dtype] * (before.double().abs() + LR)
    assert_within(ours[mode, dtype, "rollback"], before, bound, "params")
    assert ours[mode, dtype, "steps left"] == STEPS - 1


def test_the_rollback_that_stock_has_gives_the_same_on_either_op(ours, stocks):
    # AdamW in fp32 with bias correction: docs/upstream.md says what its own makes of the rest.
    found, expected = (results["adamw", torch.float32, "rollback"] for results in (ours, stocks))
    assert_within(found, expected, of_either_op(expected, STEPS + 1), "params")
