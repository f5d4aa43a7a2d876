"""The limits that keep the package readable in an afternoon, held by the machine."""

import ast
import re

from tests.unit import source_tree
from tests.unit.source_tree import relative

FILE_LINES = 500
FUNCTION_LINES = 60  # without the docstring
PARAMETERS = 7  # without self and cls
ATTRIBUTES = 15

# Signatures that are DeepSpeed's own.
PUBLIC_SIGNATURES = {
    "deepspeed/__init__.py:initialize",
    "deepspeed/comm/init.py:init_distributed",
    "deepspeed/ops/adam/cpu_adam.py:DeepSpeedCPUAdam.__init__",
    "deepspeed/ops/adam/fused_adam.py:FusedAdam.__init__",
    "deepspeed/runtime/activation_checkpointing/checkpointing.py:configure",
    "deepspeed/runtime/engine.py:DeepSpeedEngine.__init__",
    "deepspeed/runtime/lr_schedules.py:OneCycle.__init__",
    "deepspeed/runtime/zero/partition_parameters.py:Init.__init__",
}
# Models of the DeepSpeed JSON: one attribute a key, and the keys are DeepSpeed's.
CONFIG_BASES = {"Section", "Settings"}

PACKAGE = source_tree.package_files() + source_tree.patch_files()
EVERYTHING = source_tree.python_files()


def test_files_stay_under_the_line_limit():
    counts = {
        relative(path): len(path.read_text().splitlines()) for path in EVERYTHING + source_tree.cpp_files()
    }
    assert not {name: count for name, count in counts.items() if count > FILE_LINES}


def test_functions_stay_under_the_line_limit():
    counts = {
        place: node.end_lineno - node.lineno + 1 - source_tree.docstring_line_count(node)
        for place, node in _functions(EVERYTHING)
    }
    assert not {place: count for place, count in counts.items() if count > FUNCTION_LINES}


def test_functions_take_few_parameters():
    counts = {place: _parameter_count(node) for place, node in _functions(PACKAGE)}
    assert not {
        place: count
        for place, count in counts.items()
        if count > PARAMETERS and place not in PUBLIC_SIGNATURES
    }


def test_the_excepted_signatures_exist():
    assert {place for place, _ in _functions(PACKAGE)} >= PUBLIC_SIGNATURES


def test_classes_have_few_attributes():
    counts = {
        f"{relative(path)}:{node.name}": len(_attributes(node))
        for path in PACKAGE
        for node in source_tree.classes(source_tree.parse(path))
        if not _bases(node) & CONFIG_BASES
    }
    assert not {place: count for place, count in counts.items() if count > ATTRIBUTES}


def test_every_public_name_has_a_docstring():
    bare = []
    for path in PACKAGE:
        if path.read_text().strip():
            tree = source_tree.parse(path)
            public = [(name, node) for name, node in _documented(tree) if not _is_private(name)]
            bare += [f"{relative(path)}:{name}" for name, node in public if ast.get_docstring(node) is None]
    assert not bare


def test_no_function_rebinds_module_state():
    assert not [
        f"{relative(path)}:{node.lineno}"
        for path in PACKAGE
        for node in ast.walk(source_tree.parse(path))
        if isinstance(node, ast.Global)
    ]


def test_nothing_is_left_over():
    left = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK")))
    assert not [
        f"{relative(path)}: {line}"
        for path in EVERYTHING + source_tree.cpp_files()
        for line in path.read_text().splitlines()
        if left.search(line)
    ]


def _functions(paths):
    for path in paths:
        for name, node in source_tree.functions(source_tree.parse(path)):
            yield f"{relative(path)}:{name}", node


def _parameter_count(node):
    arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    return len([argument for argument in arguments if argument.arg not in ("self", "cls")])


def _documented(tree):
    """Every module, class, function and method.

    What is inside functions or only declares an interface is left out.
    """
    protocols = {node.name for node in source_tree.classes(tree) if "Protocol" in _bases(node)}
    yield "module", tree
    yield from ((node.name, node) for node in source_tree.classes(tree))
    for name, node in source_tree.functions(tree):
        if "<locals>" not in name and name.split(".")[0] not in protocols and not _is_variant(node):
            yield name, node


def _is_private(name):
    return any(part.startswith("_") for part in name.split("."))


def _bases(node):
    return {base.id for base in node.bases if isinstance(base, ast.Name)}


def _attributes(node):
    """Names that instances of a class hold: annotated in its body or assigned through self."""
    found = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for item in ast.walk(node):
        targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", None)]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if (
                    isinstance(part, ast.Attribute)
                    and isinstance(part.value, ast.Name)
                    and part.value.id == "self"
                ):
                    found.add(part.attr)
    return found


def _is_variant(node):
    """Whether a function is an overload or a setter: the main definition has the docstring."""
    return bool(
        {getattr(item, "attr", getattr(item, "id", "")) for item in node.decorator_list}
        & {"overload", "setter"}
    )
