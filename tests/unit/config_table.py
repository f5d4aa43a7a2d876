"""Renders docs/config_keys.md from the code: `python -m tests.unit.config_table`.

What happens with a key is read off the package: its tables of refusals and notices, and whether any module
but those that define the configuration reads the attribute.
"""

import ast
import re
import textwrap
from enum import Enum

import torch

from deepspeed.runtime.config_base import Section
from deepspeed.runtime.config_features import FEATURES
from deepspeed.runtime.config_notices import WITHOUT_EFFECT
from deepspeed.runtime.config_refusals import REFUSED_KEYS
from deepspeed.runtime.config_settings import Settings
from deepspeed.runtime.config_tree import json_name, section_of
from deepspeed.runtime.rank_agreement import RANKS_OWN
from tests.unit import source_tree

PAGE = source_tree.ROOT / "docs/config_keys.md"
# They hand the configuration on, or answer questions about it.
NO_READERS = re.compile(r"runtime/(config_(base|notices|refusals|settings|tree)|engine_settings)\.py$")
# Not by an attribute of that name: what else happens, and by which test it is held.
BY_HAND = {
    "prescale_gradients": "works: the mean is taken so that no sum can overflow, with any value",
    "gradient_predivide_factor": "works: the mean is taken so that no sum can overflow, with any value",
    "checkpoint.tag_validation": "no effect: tags that differ between ranks are always an error",
    "managed_gradient_accumulation": "works",
    "data_parallel_size": "works: must be the number of data-parallel ranks",
    "activation_checkpointing.cpu_checkpointing": "works in a model that calls `deepspeed.checkpointing`",
    "timers.throughput.enabled": "no effect",
    "timers.throughput.synchronized": "no effect",
    "zero_optimization.offload_param.pin_memory": "no effect",
    "comet.project": "no effect",
}
TRIANGLE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
HEAD = """# Every key of the configuration

Made from the code by `python -m tests.unit.config_table`, and compared with it by a test. A key that is not
here is an error that names the nearest one. `"auto"`, which transformers and accelerate fill in, is the
default in the sizes of `zero_optimization` and an error elsewhere.

- **works**: as in DeepSpeed 0.19.8.
- **no effect**: any valid value is accepted; there is nothing for it to change. *Told*: in the log, once.
- **refused**: at `initialize`, on every rank, by its full path, before anything is communicated.

Ranks compare their values at `initialize`; what differs is an error on all of them. These may differ:
{ranks_own}.

| key | default | |
|---|---|---|
"""


def attributes_read():
    """Names of all attributes that the package reads outside the configuration's own tables."""
    files = [path for path in source_tree.package_files() if not NO_READERS.search(path.as_posix())]
    return {
        node.attr
        for path in files
        for node in ast.walk(source_tree.parse(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def keys(model=Settings, prefix=""):
    """(path, attribute, field) of every plain key."""
    for name, info in model.model_fields.items():
        path = f"{prefix}{json_name(name, info)}"
        inner = section_of(info)
        if inner is not None:
            yield from keys(inner, f"{path}.")
        else:
            yield path, name, info


def happens():
    """Path -> what happens, for every key that the package knows, whole features included."""
    read = attributes_read()
    refusals = {refusal.path: refusal for refusal in REFUSED_KEYS}
    table = {}
    for path, name, _ in keys():
        if path in refusals:
            table[path] = f"refused unless {refusals[path].constraint}. {refusals[path].advice}"
        elif path in BY_HAND:
            table[path] = BY_HAND[path]
        elif path in WITHOUT_EFFECT:
            table[path] = f"no effect, told. {WITHOUT_EFFECT[path]}"
        else:
            table[path] = "works" if name in read else "no effect"
    for name, feature in FEATURES.items():
        table[name] = f"refused when switched on. {feature.advice}"
    return table


def render():
    """The whole page."""
    defaults = {path: shown(path, info) for path, _, info in keys()}
    rows = [
        f"| `{path}` | {defaults.get(path, 'off')} | {text.replace('|', chr(92) + '|')} |\n"
        for path, text in sorted(happens().items())
    ]
    ranks_own = textwrap.fill(", ".join(f"`{path}`" for path in sorted(RANKS_OWN)), 110)
    return HEAD.replace("{ranks_own}", ranks_own) + "".join(rows)


def shown(path, info):
    """A default as JSON would have it."""
    if path in TRIANGLE:
        return "from the other two"
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, (Section, torch.dtype)):
        return str(value)
    words = {None: "null", True: "true", False: "false"}
    is_word = value is None or isinstance(value, bool)
    return words[value] if is_word else f"`{value!r}`".replace("'", '"')


if __name__ == "__main__":
    PAGE.write_text(render())
