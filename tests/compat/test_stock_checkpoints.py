"""Checkpoints go from stock DeepSpeed to this package and back in the middle of a run, on the files alone.

`make test-peer` builds an environment with stock and sets DS_STOCK_PYTHON to its interpreter. Both sides run
the same program (`peer_job`): they train three steps, save, and train five more; then each loads what the
other saved, saves it again at once, and trains the same five steps.
"""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from deepspeed.runtime.checkpoint.torch_read import read_torch_file
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.compat.peer_job import Job
from tests.stock_python import COMPILER, LIMIT_S, OPS, STOCK

pytestmark = [
    pytest.mark.compat,
    pytest.mark.timeout(LIMIT_S),
    pytest.mark.skipif(
        STOCK is None, reason="set DS_STOCK_PYTHON to an interpreter with stock DeepSpeed 0.19.8"
    ),
]

ROOT = Path(__file__).parents[2]
BEFORE, AFTER = 3, 5
CASES = {
    f"stage {stage}{' offload' * offload} {dtype}": Job(stage=stage, offload=offload, dtype=dtype)
    for dtype in ("bf16", "fp16")
    for stage in (1, 2)
    for offload in (True, False)
}
CASES |= {
    "fp32": Job(dtype="fp32"),
    "accumulation 2": Job(accumulation=2),
    "client's SGD": Job(optimizer="client_sgd"),
    "client's AdamW": Job(optimizer="client_adamw"),
    "Adagrad": Job(optimizer="Adagrad"),
}
# Starts so high that steps are skipped before and after the exchange.
OVERFLOWS = "overflows"
JOBS = {**CASES, OVERFLOWS: Job(dtype="fp16", fp16={"initial_scale_power": 30})}
# Where the two sides do not round alike: relative to 1, the size of losses and of the largest weights.
BOUNDS = {
    # Two implementations of Adam: a few units in the last place (2^-24) a step, over eight steps.
    "fp32": 8 * 4 * 2.0**-24,
    # The same, seen through weights that are rounded to 8 bits: a difference shows where one falls on another
    # side.
    "bf16": 2.0**-8,
    # Stock adds the ranks' gradients in fp16, this package in fp32: an error of 2^-11 of a step, and rounding
    # to 11 bits.
    "fp16": 2.0**-10,
}


def _python(python, *arguments):
    """Run one side's interpreter; stock's ops have a folder beside it, where they do not meet ours."""
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if python == STOCK:
        env |= {"PYTHONPATH": "", "TORCH_EXTENSIONS_DIR": str(OPS), "CXX": str(COMPILER)}
    return subprocess.run(
        [python, *arguments], env=env, cwd="/", capture_output=True, text=True, timeout=LIMIT_S
    )


def _run(python, world, jobs):
    """Run jobs on one side; returns for each job what each rank returned."""
    task = json.dumps({"world": world, "jobs": [asdict(job) for job in jobs]})
    run = _python(python, str(Path(__file__).with_name("peer_job.py")), task)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, run.stdout[-4000:] + run.stderr[-4000:]
    results = json.loads(lines[0].removeprefix("RESULT "))
    for job, ranks in zip(jobs, results, strict=True):
        for result in ranks:
            assert "error" not in result, f"{job}: {result['error']}"
    return results


class Exchange:
    """All runs of one world: `own[side]`, the uninterrupted ones, and `crossed[side]`, from the other side's
    files."""

    def __init__(self, world, folder):
        self.folder = folder
        pythons = {"stock": STOCK, "ours": sys.executable}
        others = {"stock": "ours", "ours": "stock"}
        self.own, self.crossed = {}, {}
        for side, python in pythons.items():
            jobs = [
                replace(job, steps=BEFORE, save=self.path(side, name), more=AFTER)
                for name, job in JOBS.items()
            ]
            self.own[side] = dict(zip(JOBS, _run(python, world, jobs), strict=True))
        for side, python in pythons.items():
            jobs = [
                replace(
                    job,
                    seed=1,
                    load=self.path(others[side], name),
                    save=self.path(f"{others[side]} through {side}", name),
                    more=AFTER,
                )
                for name, job in JOBS.items()
            ]
            self.crossed[side] = dict(zip(JOBS, _run(python, world, jobs), strict=True))

    def path(self, side, name):
        return str(self.folder / side / name)


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def exchange(request, stocks_ops, tmp_path_factory):
    return Exchange(request.param, tmp_path_factory.mktemp("exchange"))


DIRECTIONS = pytest.mark.parametrize(("writer", "reader"), [("stock", "ours"), ("ours", "stock")])
EVERY_CASE = pytest.mark.parametrize("name", CASES)


def _difference(first, second):
    """Largest difference of two runs' losses and weights."""
    pairs = list(zip(first["more"], second["more"], strict=True))
    for name, values in first["weights"].items():
        pairs += zip(values, second["weights"][name], strict=True)
    assert all(math.isfinite(value) for pair in pairs for value in pair)
    return max(abs(a - b) for a, b in pairs)


@DIRECTIONS
@EVERY_CASE
def test_the_run_goes_on_as_if_it_had_not_changed_sides(name, writer, reader, exchange):
    dtype = CASES[name].dtype
    for straight, other, crossed in zip(
        exchange.own[writer][name], exchange.own[reader][name], exchange.crossed[reader][name], strict=True
    ):
        alike = straight["more"] == other["more"] and straight["weights"] == other["weights"]
        assert _difference(straight, crossed) <= (0.0 if alike else BOUNDS[dtype])
        assert crossed["lr"] == straight["lr"] and crossed["scale"] == straight["scale"]
        steps, samples, _, skipped = straight["counters"]
        assert crossed["counters"][:2] == [steps, samples] and crossed["counters"][3] == skipped
        assert crossed["client"]["epoch"] == "3" and crossed["client"]["tensor"] == "tensor([0, 1, 2])"


def test_a_dynamic_loss_scale_comes_along_from_stock_and_starts_over_in_stock(exchange):
    """Stock keeps its scaler as an object of a class of its own, which plain files cannot hold."""
    for rank, straight in enumerate(exchange.own["stock"][OVERFLOWS]):
        ours, stock = (exchange.crossed[side][OVERFLOWS][rank] for side in ("ours", "stock"))
        assert straight["counters"][3] > BEFORE, "the test must skip steps"
        assert ours["scale"] == straight["scale"] < 2.0 ** (30 - BEFORE)
        assert ours["counters"][3] == straight["counters"][3]
        assert stock["scale"] == 2.0 ** (30 - AFTER)


def _tensors(value, place=""):
    """Every tensor in nested containers, by where it stands."""
    if isinstance(value, torch.Tensor):
        return {place: value}
    if isinstance(value, dict):
        return {k: t for key, item in value.items() for k, t in _tensors(item, f"{place}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: t for key, item in enumerate(value) for k, t in _tensors(item, f"{place}/{key}").items()}
    return {}


@DIRECTIONS
@EVERY_CASE
def test_saved_again_at_once_every_tensor_has_its_bits(name, writer, reader, exchange):
    """Masters, moments, weights and frozen weights, whatever the two sides compute from them."""
    before = Path(exchange.path(writer, name), f"global_step{BEFORE}")
    after = Path(exchange.path(f"{writer} through {reader}", name), f"global_step{BEFORE}")
    files = sorted(path.name for path in before.iterdir())
    assert files == sorted(path.name for path in after.iterdir())
    for file in files:
        first, second = (_tensors(read_torch_file(folder / file)) for folder in (before, after))
        assert len(first) >= 4
        for place in first.keys() & second.keys() if "model" in file else first.keys() | second.keys():
            assert place in first and place in second, f"{file} {place}"
            # Stock's masters are views of padded storage, its steps tensors or numbers by optimizer.
            assert torch.equal(first[place], second[place]), f"{file} {place}"


@pytest.fixture(scope="module")
def stocks_conversions(exchange):
    """fp32 weights as stock's converter takes them from every checkpoint, by path."""
    program = (
        "import sys, torch\n"
        "from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as convert\n"
        "torch.save({path: convert(path) for path in sys.argv[2:]}, sys.argv[1])\n"
    )
    paths = [exchange.path(side, name) for side in exchange.own for name in CASES]
    run = _python(STOCK, "-c", program, exchange.path("stock", "converted.pt"), *paths)
    assert run.returncode == 0, run.stderr
    return torch.load(exchange.path("stock", "converted.pt"), weights_only=True)


@pytest.mark.parametrize("side", ["ours", "stock"])
@EVERY_CASE
def test_both_converters_read_both_sides_files_alike(name, side, exchange, stocks_conversions):
    path = exchange.path(side, name)
    theirs, ours = dict(stocks_conversions[path]), get_fp32_state_dict_from_zero_checkpoint(path)
    if "stage 1" in name and side == "stock":
        # Stock names frozen parameters in its files from stage 2 on; its converter passes over the others.
        theirs |= {key: value for key, value in ours.items() if key.startswith("frozen.")}
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(ours[key], value) and ours[key].dtype == value.dtype, key
