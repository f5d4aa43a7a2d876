"""Public signatures, frozen: a changed one is a changed contract with the clients."""

import importlib
import inspect

import pytest

from tests.unit import source_tree

FROZEN = source_tree.ROOT / "tests/unit/data/signatures.txt"
LINES = [line for line in FROZEN.read_text().splitlines() if line and not line.startswith("#")]


def resolved(dotted):
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = inspect.getattr_static(found, name) if inspect.isclass(found) else getattr(found, name)
        return found
    raise ModuleNotFoundError(dotted)


def shown(dotted):
    """`name(parameters)` without annotations, or `name: property` or `name: class`."""
    found = resolved(dotted)
    if isinstance(found, property):
        return f"{dotted}: property"
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(found).parameters.values()
        if parameter.name != "self"
    ]
    return f"{dotted}{inspect.Signature(parameters)}"


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition("(")[0].partition(":")[0])
def test_a_signature_is_what_clients_rely_on(line):
    assert shown(line.partition("(")[0].partition(":")[0]) == line


def test_every_public_method_of_the_engine_and_its_optimizer_is_frozen():
    frozen = {line.partition("(")[0].partition(":")[0] for line in LINES}
    for owner in ("deepspeed.DeepSpeedEngine", "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"):
        own = [base for base in resolved(owner).__mro__ if base.__module__.startswith("deepspeed")]
        names = {name for base in own for name in vars(base) if not name.startswith("_")}
        assert {f"{owner}.{name}" for name in names if callable_or_property(owner, name)} <= frozen


def callable_or_property(owner, name):
    found = resolved(f"{owner}.{name}")
    return callable(found) or isinstance(found, property)
