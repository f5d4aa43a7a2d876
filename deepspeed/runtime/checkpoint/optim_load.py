"""From a checkpoint's optimizer state into a live optimizer's shard, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.tiled import TiledOptimizer
from deepspeed.runtime.checkpoint.optim_states import LOSS_SCALER, is_flat_state
from deepspeed.runtime.checkpoint.saved_optimizer import MASTER, SavedOptimizer
from deepspeed.runtime.zero.forms import Flat, QuantizedMoment
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

# Elements of a smaller form that are read into fp32 and narrowed at once; a multiple of its blocks.
_TILE_NUMEL = 1 << 20
# Settings that some classes know and others do not: not taken by those that do not.
_CLASS_OPTIONS = ("bias_correction", "step", "amsgrad", "maximize")
# How an optimizer computes is its own: these settings of a group are not taken from a file.
_OWN_OPTIONS = ("params", "fused", "foreach", "capturable", "differentiable", "decoupled_weight_decay")


def optimizer_mismatches(optimizer: DeepSpeedZeroOptimizer, saved: SavedOptimizer) -> Iterator[str]:
    """Why saved state does not fit an optimizer, before anything is loaded."""
    parts, inner = optimizer.parts, optimizer.optimizer
    if len(saved.options) != len(parts.groups):
        yield f"param_groups: expected {len(parts.groups)} groups, got {len(saved.options)}"
        return
    needed = _needed_names(inner)
    for group, layout in enumerate(parts.groups):
        own = {parts.names[slot.index]: slot.numel for slot in layout.slots}
        numels = {name: numel for name, numel in saved.numels(group).items() if numel}
        place = f"param_groups[{group}]"
        for name, numel in own.items():
            if numels.get(name) != numel:
                yield f"{place}, {name}: expected {numel} elements, got {numels.get(name, 'none')}"
        yield from (f"{place}, {name}: not in the optimizer" for name in numels if name not in own)
        names = set(saved.flat_dtypes(group))
        if own and names and needed is not None and not needed <= names:
            yield f"state of {place}: expected {sorted(needed)}, got {sorted(names)}: of another optimizer"


def load_optimizer(
    optimizer: DeepSpeedZeroOptimizer, saved: SavedOptimizer, advance: Callable[[int], None]
) -> None:
    """Copy masters and state of this rank's shard, and the groups' settings.

    Tensors that exist are overwritten where they are; those that the optimizer would make at its first step
    are made now. Nothing else is allocated.

    Args:
        optimizer: whose shard it is.
        saved: the checkpoint's state.
        advance: is told of bytes copied.
    """
    inner, made = optimizer.optimizer, False
    for group, options in enumerate(inner.param_groups):
        master = optimizer.parts.master.masters[group]
        _copy_shard(optimizer, saved, MASTER, group, master)
        advance(master.nbytes)
        made |= _load_state(optimizer, saved, group, advance)
        _load_options(options, saved.options[group])
    if made:
        # Lets torch's optimizers bring entries such as `step` into the form that they keep.
        inner.__setstate__({"state": inner.state, "param_groups": inner.param_groups})


def shard_nbytes(optimizer: DeepSpeedZeroOptimizer, saved: SavedOptimizer) -> int:
    """Bytes that `load_optimizer` copies."""
    parts, total = optimizer.parts, 0
    for group, layout in enumerate(parts.groups):
        itemsizes = [dtype.itemsize for dtype in _wanted(optimizer.optimizer, saved, group).values()]
        total += layout.shard_numel(parts.shard) * (torch.float32.itemsize + sum(itemsizes))
    return total


def load_loss_scaler(optimizer: DeepSpeedZeroOptimizer, shard: Mapping[str, Any]) -> None:
    """Take over a dynamic loss scale, from our key, from stock's object, or from stage 0's keys.

    A fixed scale is the configuration's word, whatever the file says.
    """
    saved = shard.get(LOSS_SCALER)
    if saved is None:
        saved = vars(shard["loss_scaler"]) if "loss_scaler" in shard else shard
    if optimizer.loss_scaler.dynamic and shard.get("dynamic_loss_scale") and "cur_scale" in saved:
        optimizer.loss_scaler.load_state_dict(saved)


def _copy_shard(
    optimizer: DeepSpeedZeroOptimizer, saved: SavedOptimizer, key: str, group: int, flat: Flat
) -> None:
    """Fill a flat tensor of this rank's shard, parameter by parameter; a smaller form, tile by tile."""
    if isinstance(flat, torch.Tensor):
        _copy_run(optimizer, saved, key, group, 0, flat.detach())
        return
    for start in range(0, flat.numel(), _TILE_NUMEL):
        tile = torch.empty(min(_TILE_NUMEL, flat.numel() - start))
        _copy_run(optimizer, saved, key, group, start, tile)
        flat.write(start, tile)


def _copy_run(
    optimizer: DeepSpeedZeroOptimizer,
    saved: SavedOptimizer,
    key: str,
    group: int,
    start: int,
    out: torch.Tensor,
) -> None:
    """Fill `out` with a run of this rank's shard from `start` on."""
    parts = optimizer.parts
    layout = parts.groups[group]
    base = layout.shard_bounds(parts.shard)[0] + start
    for segment in layout.segments(base, base + out.numel()):
        place = out[segment.offset : segment.offset + segment.numel]
        saved.copy(key, group, parts.names[segment.slot.index], segment.param_start, place)


def _load_state(
    optimizer: DeepSpeedZeroOptimizer, saved: SavedOptimizer, group: int, advance: Callable[[int], None]
) -> bool:
    """Copy a group's state; returns whether the optimizer had no entry yet for one of the scalars."""
    inner = optimizer.optimizer
    master = inner.param_groups[group]["params"][0]
    state, scalars = inner.state[master], saved.scalars(group)
    wanted = _wanted(inner, saved, group)
    if not wanted and not scalars:
        _forget(inner, state)
    for name, dtype in wanted.items():
        if not is_flat_state(state.get(name), master):
            state[name] = torch.empty(master.shape, dtype=dtype, device=master.device)
        _copy_shard(optimizer, saved, name, group, state[name])
        advance(state[name].nbytes)
    made = not scalars.keys() <= state.keys()
    for name, value in scalars.items():
        state[name] = _in_form_of(state.get(name), value)
    if not state:
        del inner.state[master]
    return made


def _load_options(options: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Take over a group's settings, the client's own keys included."""
    for key, value in saved.items():
        if key not in _OWN_OPTIONS and (key in options or key not in _CLASS_OPTIONS):
            options[key] = _copied(value)


def _needed_names(inner: torch.optim.Optimizer) -> set[str] | None:
    """The flat entries that an optimizer works with; None if that is not known."""
    if isinstance(inner, (DeepSpeedCPUAdam, torch.optim.Adam, torch.optim.AdamW)):
        amsgrad = any(group.get("amsgrad") for group in inner.param_groups)
        return {"exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if amsgrad else set())
    return {inner.moment_name} if isinstance(inner, TiledOptimizer) else None


def _wanted(inner: torch.optim.Optimizer, saved: SavedOptimizer, group: int) -> dict[str, torch.dtype]:
    """The flat entries to load; stock's optimizers keep some that ours do not use."""
    needed = _needed_names(inner)
    return {
        name: dtype for name, dtype in saved.flat_dtypes(group).items() if needed is None or name in needed
    }


def _forget(inner: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Back to the state of an optimizer that has not stepped: zeros where it is made ahead, else none."""
    if not isinstance(inner, DeepSpeedCPUAdam):
        state.clear()
    for name, value in state.items():
        if isinstance(value, (torch.Tensor, QuantizedMoment)):
            value.zero_()
        else:
            state[name] = type(value)(0)


def _in_form_of(own: Any, value: Any) -> Any:
    """A scalar entry as the optimizer keeps it: a whole number or a tensor."""
    if isinstance(own, int):
        return int(value)
    if isinstance(own, torch.Tensor):
        return torch.as_tensor(value, dtype=own.dtype).to(own.device, copy=True)
    return _copied(value)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
