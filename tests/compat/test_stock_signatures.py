"""What stock's public callables take, ours take under the same names and in the same order."""

import json
import os
import subprocess

import pytest

from tests.unit.test_signatures import LINES, resolved, shown

pytestmark = pytest.mark.compat

STOCK = os.environ.get("DS_STOCK_PYTHON")

CODE = """
import importlib, inspect, json, sys
found = {}
for dotted in json.load(sys.stdin):
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:length]))
            for name in parts[length:]:
                thing = getattr(thing, name)
            kinds = inspect.signature(thing).parameters.values()
            found[dotted] = [p.name for p in kinds if p.kind not in (2, 4) and p.name != "self"]
            break
        except (ImportError, AttributeError, TypeError, ValueError):
            continue
print("FOUND" + json.dumps(found))
"""
# Called by `initialize` and the engine, not by clients.
OURS = {
    "deepspeed.DeepSpeedEngine.__init__",
    "deepspeed.runtime.config.DeepSpeedConfig.__init__",
    "deepspeed.runtime.dataloader.DeepSpeedDataLoader.__init__",
    "deepspeed.DeepSpeedEngine.load_module_state_dict",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.load_state_dict",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.unscale_and_clip_grads",
}


@pytest.mark.skipif(STOCK is None, reason="set DS_STOCK_PYTHON to an interpreter with stock DeepSpeed")
def test_what_stocks_callables_take_ours_take(tmp_path):
    names = [line.partition("(")[0] for line in LINES if "(" in line]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [STOCK, "-c", CODE],
        input=json.dumps(names),
        env={**environment, "DS_ACCELERATOR": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    stock = json.loads(done.stdout.rpartition("FOUND")[2])
    assert len(stock) > 90
    assert not {name: why for name in stock.keys() - OURS if (why := lacks(name, stock[name]))}


def lacks(name, theirs):
    """What a call in stock's form would fail at; empty if nothing."""
    line = shown(name)
    if "**" in line or callable(resolved(name)) is False:
        return ""
    ours = [word.strip().partition("=")[0] for word in line.partition("(")[2].rstrip(")").split(", ")]
    return "" if [name for name in ours if name in theirs] == theirs else f"stock {theirs}, here {ours}"
