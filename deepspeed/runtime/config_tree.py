"""From the JSON as written to a tree of canonical keys: dotted keys, old names, nulls and "auto".

Nothing here validates values: it makes sure that what reaches the models is keyed as they expect, and reports
keys that nobody knows and "auto" that nobody filled in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic.fields import FieldInfo

from deepspeed.runtime.config_base import Section
from deepspeed.runtime.config_problems import Problems

Tree = dict[str, Any]

OLD_NAMES = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    **{
        f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
        for name in (
            "gather_16bit_weights_on_model_save",
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
}
NULL_IS_WRONG = (
    "gradient_clipping",
)  # null could mean off as well as the default; elsewhere null is the default
AUTO_IS_DEFAULT = ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size")
AUTO_IS_A_VALUE = ("data_types.keep_in_fp32_modules",)


def copy_tree(value: Any) -> Any:
    """Copy nested mappings to plain dicts without comment keys ("_comment"); the caller's stays as it is."""
    if isinstance(value, Mapping):
        return {str(key): copy_tree(item) for key, item in value.items() if not _is_comment(key)}
    return value


def _is_comment(key: object) -> bool:
    return str(key).startswith(("_", "//", "#"))


def canonical_tree(raw: Mapping[str, Any], problems: Problems) -> Tree:
    """Return a copy of the configuration under canonical names.

    Args:
        raw: The configuration as passed.
        problems: Collects pairs of old and new names that disagree.
    """
    tree: Tree = copy_tree(raw)
    _expand_dotted(tree)
    _expand_switches(tree)
    for old, new in OLD_NAMES.items():
        _rename(tree, old, new, problems)
    _expand_cpu_offload(tree)
    return {key: value for key, value in tree.items() if value is not None or key in NULL_IS_WRONG}


def _expand_dotted(tree: Tree) -> None:
    """Move "section.key" to its place; a value that is already there, other than "auto", wins."""
    for dotted in [key for key in tree if "." in key]:
        *sections, name = dotted.split(".")
        place: Any = tree
        for section in sections:
            place = place.setdefault(section, {}) if isinstance(place, dict) else None
        if isinstance(place, dict):
            value = tree.pop(dotted)
            if place.get(name, "auto") == "auto":
                place[name] = value


def _expand_switches(tree: Tree) -> None:
    """Turn ``"zero_optimization": true``, the oldest form, into stage 1; false into stage 0."""
    if isinstance(tree.get("zero_optimization"), bool):
        tree["zero_optimization"] = {"stage": int(tree["zero_optimization"])}


def _rename(tree: Tree, old: str, new: str, problems: Problems) -> None:
    section, _, old_name = old.rpartition(".")
    place = tree.get(section) if section else tree
    if not isinstance(place, dict) or old_name not in place:
        return
    new_name = new.rpartition(".")[2]
    value = place.pop(old_name)
    if place.setdefault(new_name, value) != value:
        problems.fault(
            new, f"the value of its other name {old}, {value!r}", place[new_name], "Keep one of the two."
        )


def _expand_cpu_offload(tree: Tree) -> None:
    """Turn the three ``cpu_offload*`` booleans of old configurations into offload sections."""
    zero = tree.get("zero_optimization")
    if not isinstance(zero, dict):
        return
    target = {"device": "cpu"}
    if "cpu_offload_use_pin_memory" in zero:
        target["pin_memory"] = zero.pop("cpu_offload_use_pin_memory")
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if zero.pop(old, False):
            zero.setdefault(new, dict(target))


def json_name(name: str, info: FieldInfo) -> str:
    """Return the JSON key of a model's field."""
    return info.alias or name


def section_of(info: FieldInfo) -> type[Section] | None:
    """Return the Section model behind a field, or None for a plain value."""
    for candidate in (info.annotation, *get_args(info.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def paths_of(model: type[Section], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, full path) of every key of a model and of the sections in it."""
    for name, info in model.model_fields.items():
        key = json_name(name, info)
        yield key, f"{prefix}{key}"
        inner = section_of(info)
        if inner is not None:
            yield from paths_of(inner, f"{prefix}{key}.")


def drop_unknown(
    tree: Tree, model: type[Section], elsewhere: Mapping[str, str], problems: Problems, path: str = ""
) -> None:
    """Remove and report every key that the model, or a section in it, does not know."""
    fields = {json_name(name, info): info for name, info in model.model_fields.items()}
    for key in list(tree):
        if key not in fields:
            problems.unknown_key(f"{path}{key}", fields, elsewhere)
            del tree[key]
            continue
        inner = section_of(fields[key])
        if inner is not None and isinstance(tree[key], dict):
            drop_unknown(tree[key], inner, elsewhere, problems, f"{path}{key}.")


def drop_auto(tree: Tree, path: str = "") -> list[str]:
    """Remove every "auto" and return the full paths of those that have no default of their own."""
    left: list[str] = []
    for key in list(tree):
        full = f"{path}{key}"
        value = tree[key]
        if isinstance(value, dict):
            left += drop_auto(value, f"{full}.")
        elif _holds_auto(value) and full not in AUTO_IS_A_VALUE:
            del tree[key]
            if not (path == "zero_optimization." and (key in AUTO_IS_DEFAULT or key.startswith("stage3_"))):
                left.append(full)
    return left


def _holds_auto(value: Any) -> bool:
    return value == "auto" if isinstance(value, str) else isinstance(value, (list, tuple)) and "auto" in value
