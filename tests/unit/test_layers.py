"""Dependencies between the package's modules point down only, and never in circles."""

import ast
import graphlib

import pytest

from tests.unit import source_tree

# Start of a module's name -> layer; the longest counts. A module imports from its own layer and below.
LAYERS = {
    "deepspeed.version": 0,
    "deepspeed.git_version_info": 1,
    "deepspeed.ops.op_builder": 1,
    "op_builder": 1,
    "deepspeed.accelerator": 1,
    "deepspeed.comm": 5,
    "deepspeed.utils": 2,
    "deepspeed.utils.zero_to_fp32": 12,
    "deepspeed.ops": 3,
    "deepspeed.checkpoint": 3,
    "deepspeed.launcher": 3,
    "deepspeed.elasticity": 3,
    "deepspeed.module_inject": 3,
    "deepspeed.moe": 3,
    "deepspeed.monitor": 4,
    "deepspeed.pipe": 3,
    "deepspeed.runtime.zero.config": 3,
    "deepspeed.runtime.zero.forms": 3,
    "deepspeed.runtime.zero.offload_config": 3,
    "deepspeed.runtime.config": 3,
    "deepspeed.runtime": 5,
    "deepspeed.runtime.zero": 6,
    "deepspeed.runtime.zero.layout": 4,
    "deepspeed.runtime.zero.collectives": 4,
    "deepspeed.runtime.zero.host_buffer": 4,
    "deepspeed.runtime.zero.change_gate": 4,
    "deepspeed.runtime.zero.settings": 4,
    "deepspeed.runtime.zero.publisher": 5,
    "deepspeed.runtime.zero.ring": 5,
    "deepspeed.runtime.zero.staging": 6,
    "deepspeed.runtime.zero.host_shard": 6,
    "deepspeed.runtime.zero.needs": 6,
    "deepspeed.runtime.zero.preflight": 7,
    "deepspeed.runtime.zero.buckets": 7,
    "deepspeed.runtime.zero.host_master": 7,
    "deepspeed.runtime.zero.device_master": 7,
    "deepspeed.runtime.zero.parts": 8,
    "deepspeed.runtime.zero.param_access": 9,
    "deepspeed.runtime.zero.stage_1_and_2": 10,
    "deepspeed.runtime.checkpoint": 11,
    "deepspeed.runtime.engine": 12,
    "deepspeed.runtime.engine_settings": 5,
    "deepspeed.runtime.engine_setup": 11,
    "deepspeed.zero": 7,
    "deepspeed.checkpointing": 7,
    "deepspeed.env_report": 13,
    "deepspeed.memory": 13,
    "deepspeed": 13,
}
WITHOUT_DISTRIBUTED = (
    "deepspeed.runtime.config",
    "deepspeed.runtime.zero.config",
    "deepspeed.runtime.zero.layout",
)


def _module_name(path):
    parts = list(path.relative_to(source_tree.ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module_name(path): path for path in source_tree.package_files()}


def _layer(module):
    return LAYERS[max((start for start in LAYERS if module.startswith(start)), key=len)]


def _own_module(name):
    """The package's module that a dotted name is, or is in; None for other packages."""
    name = name.replace("deepspeed.ops.op_builder", "op_builder")
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def _imported_names(module, path):
    """Dotted names that a module imports, inside functions too."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(source_tree.parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _edges():
    for module, path in MODULES.items():
        for name in _imported_names(module, path):
            target = _own_module(name)
            if target is not None and target != module:
                yield module, target


EDGES = sorted(set(_edges()))


def test_the_source_was_found():
    assert len(MODULES) > 30
    assert ("deepspeed.runtime.engine", "deepspeed.runtime.config") in EDGES


def test_every_import_points_down():
    up = [(source, target) for source, target in EDGES if _layer(source) < _layer(target)]
    assert not up


def test_no_import_goes_in_a_circle():
    graph = {}
    for source, target in EDGES:
        graph.setdefault(source, set()).add(target)
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_only_the_top_level_imports_the_engine():
    assert {source for source, target in EDGES if target == "deepspeed.runtime.engine"} == {"deepspeed"}


@pytest.mark.parametrize("module", sorted(name for name in MODULES if name.startswith(WITHOUT_DISTRIBUTED)))
def test_config_and_layout_do_without_torch_distributed(module):
    names = list(_imported_names(module, MODULES[module]))
    assert not [name for name in names if name.startswith("torch.distributed")]
