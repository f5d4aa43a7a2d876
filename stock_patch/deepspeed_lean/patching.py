"""What is replaced in stock, checked, logged and undone."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from . import SWITCHES, pinning
from .gradients import Fp32Accumulation, NoTemporary
from .host_state import HostState3, HostState12
from .host_threads import host_threads
from .log import log
from .op_beside_stocks import OpBesideStocks
from .shapes import Shape, mismatch
from .stage_base import load_op
from .tiled_step import DeferredUnscale, TiledUpload

KNOWN_RELEASE = "0.19."
_STATE = "_lean_patch"  # attribute of the deepspeed module that holds what is replaced


class ClassPatch(NamedTuple):
    """A class of stock's that gets mixins, and the modules that know it by name."""

    name: str
    modules: tuple[str, ...]
    mixins: Mapping[str, type]  # switch -> mixin, in the order of method resolution


# Modules that derive from these classes must know the original, whenever they are imported.
_DERIVED = (
    "deepspeed.runtime.zenflow.zenflow_stage_1_and_2",
    "deepspeed.runtime.superoffload.superoffload_stage3",
)
CLASSES = (
    ClassPatch(
        "DeepSpeedZeroOptimizer",
        ("deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.engine"),
        {
            "unscale": DeferredUnscale,
            "staging": TiledUpload,
            "accumulator": Fp32Accumulation,
            "temporary": NoTemporary,
            "host_buffers": HostState12,
        },
    ),
    ClassPatch(
        "DeepSpeedZeroOptimizer_Stage3",
        ("deepspeed.runtime.zero.stage3",),
        {"host_buffers": HostState3},
    ),
)
_DEVICES = ("cuda", "cpu")
_BUILDER_SHAPES = {"load": Shape(("self", "verbose"))}


@dataclass
class _Replaced:
    """What stands in stock now, and what stood there."""

    names: list[str] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute, to be restored."""
        if name in vars(owner):
            self.undo.append(partial(setattr, owner, name, vars(owner)[name]))
        else:
            self.undo.append(partial(delattr, owner, name))
        setattr(owner, name, value)


def apply(switches: Mapping[str, bool]) -> tuple[str, ...]:
    """See `deepspeed_lean.apply`."""
    wanted = _wanted(switches)
    deepspeed = importlib.import_module("deepspeed")
    revert()
    version = deepspeed.__version__
    if not version.startswith(KNOWN_RELEASE) or "lean" in version:
        log().warning(
            "deepspeed_lean: expected DeepSpeed %sx, got %s; nothing is replaced. %s",
            KNOWN_RELEASE,
            version,
            "DeepSpeed Lean needs no patch."
            if "lean" in version
            else "Look for a newer deepspeed-lean-patch.",
        )
        return ()
    device = importlib.import_module("deepspeed.accelerator").get_accelerator().device_name()
    if device not in _DEVICES:
        log().warning("deepspeed_lean: expected CUDA or a CPU, got %s; nothing is replaced.", device)
        return ()
    host_threads()  # a wrong number is said here, and not in a backward pass
    for name in _DERIVED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    replaced = _Replaced()
    for patch in CLASSES:
        _mix(patch, wanted, replaced)
    if "adam_op" in wanted:
        _replace_op(replaced)
    if "pinning" in wanted:
        _replace_pinning(replaced)
    setattr(deepspeed, _STATE, replaced)
    return applied()


def revert() -> None:
    """See `deepspeed_lean.revert`."""
    deepspeed = importlib.import_module("deepspeed")
    replaced = deepspeed.__dict__.pop(_STATE, None)
    while replaced is not None and replaced.undo:
        replaced.undo.pop()()


def applied() -> tuple[str, ...]:
    """See `deepspeed_lean.applied`."""
    replaced = vars(importlib.import_module("deepspeed")).get(_STATE)
    names = replaced.names if replaced is not None else ()
    return tuple(name for name in SWITCHES if name in names)


def _wanted(switches: Mapping[str, bool]) -> set[str]:
    """Names of the switches that are on."""
    off = [name.strip() for name in os.environ.get("DEEPSPEED_LEAN_OFF", "").split(",") if name.strip()]
    for source, names in (("DEEPSPEED_LEAN_OFF", off), ("apply", switches)):
        unknown = [name for name in names if name not in SWITCHES]
        if unknown:
            raise ValueError(
                f"{source}: expected names among {', '.join(SWITCHES)}, got {', '.join(unknown)}. "
                "Correct them."
            )
    return {name for name in SWITCHES if switches.get(name, True) and name not in off}


def _mix(patch: ClassPatch, wanted: set[str], replaced: _Replaced) -> None:
    """Put a class with the wanted mixins in the place of stock's."""
    home = importlib.import_module(patch.modules[0])
    stocks = getattr(home, patch.name)
    mixins = []
    for switch, mixin in patch.mixins.items():
        if switch in wanted and _fits(switch, stocks, _shapes(mixin)):
            mixins.append(mixin)
            replaced.names.append(switch)
            log().info("deepspeed_lean: %s replaces parts of %s", switch, patch.name)
    if not mixins:
        return
    mixed = type(patch.name, (*mixins, stocks), {"__module__": stocks.__module__, "__doc__": stocks.__doc__})
    for name in patch.modules:
        module = importlib.import_module(name)
        if getattr(module, patch.name, None) is stocks:
            replaced.set(module, patch.name, mixed)


def _shapes(mixin: type) -> Mapping[str, Shape]:
    """What a mixin and its bases rely on."""
    return {
        name: shape
        for base in reversed(mixin.__mro__)
        for name, shape in vars(base).get("SHAPES", {}).items()
    }


def _replace_op(replaced: _Replaced) -> None:
    """Have stock's DeepSpeedCPUAdam load our op."""
    stocks = importlib.import_module("deepspeed.ops.op_builder").CPUAdamBuilder
    if not _fits("adam_op", stocks, _BUILDER_SHAPES):
        return

    load_stocks = stocks.load

    def load(self: Any, verbose: bool = True) -> Any:
        ours = load_op()
        # In plain torch it has not stock's calls.
        if not hasattr(ours, "create_adam"):
            return load_stocks(self, verbose)
        return OpBesideStocks(ours, partial(load_stocks, self, verbose))

    replaced.set(stocks, "load", load)
    replaced.names.append("adam_op")
    log().info("deepspeed_lean: adam_op replaces the op of DeepSpeedCPUAdam")


def _replace_pinning(replaced: _Replaced) -> None:
    """Have the accelerator pin without rounding up, if it page-locks through torch and CUDA."""
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    owner = type(accelerator)
    if accelerator.device_name() != "cuda" or not _fits("pinning", owner, pinning.SHAPES):
        return
    replaced.set(owner, "_torch_pin_memory", pinning.exact_pin_memory(owner._torch_pin_memory))
    replaced.set(owner, "_torch_empty_pinned", pinning.exact_empty_pinned(owner._torch_empty_pinned))
    replaced.names.append("pinning")
    log().info("deepspeed_lean: pinning replaces torch's allocator of page-locked memory")


def _fits(switch: str, owner: Any, shapes: Mapping[str, Shape]) -> bool:
    """Whether a class looks as a replacement expects; warns if not."""
    problem = mismatch(owner, shapes)
    if problem is not None:
        log().warning("deepspeed_lean: %s is left to stock: %s.", switch, problem)
    return problem is None
