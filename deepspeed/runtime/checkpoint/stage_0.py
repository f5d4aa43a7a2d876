"""Stage 0 keeps its optimizer in the model file: whole, in one of stock's two forms.

A 16-bit model has flat fp32 masters, as at the other stages; an fp32 model has an entry for each parameter,
whose weight is the master.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed.runtime.checkpoint.optim_states import inner_state, is_flat_state, with_stock_keys
from deepspeed.runtime.checkpoint.saved_optimizer import MASTER, PerParamState, SavedOptimizer, ShardedState
from deepspeed.runtime.checkpoint.torch_file import TensorSource
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def stage_0_state(optimizer: DeepSpeedZeroOptimizer, clip_grad: float) -> dict[str, Any]:
    """What the model file holds under `optimizer` at stage 0."""
    parts = optimizer.parts
    if all(param.dtype == torch.float32 for param in parts.params.values()):
        return _per_param(optimizer)
    state = {
        "optimizer_state_dict": inner_state(optimizer),
        "fp32_groups_flat": [TensorSource(master) for master in parts.master.masters],
        "clip_grad": clip_grad,
    }
    if optimizer.loss_scaler.dynamic:
        state |= {"dynamic_loss_scale": True, **optimizer.loss_scaler.state_dict()}
    return state


def open_stage_0(
    saved: Mapping[str, Any], model: Mapping[str, Any], optimizer: DeepSpeedZeroOptimizer
) -> SavedOptimizer:
    """Read what `stage_0_state`, or stock at stage 0, wrote.

    Args:
        saved: what the model file holds under `optimizer`.
        model: the model file's content.
        optimizer: names the parameters where the file does not.
    """
    if "fp32_groups_flat" not in saved:
        return PerParamState(saved, _group_names(optimizer), model["module"])
    parts = optimizer.parts
    shapes = model.get("param_shapes") or [
        {parts.names[slot.index]: parts.params[slot.index].shape for slot in layout.slots}
        for layout in parts.groups
    ]
    shard = {MASTER: saved["fp32_groups_flat"], "base_optimizer_state": saved["optimizer_state_dict"]}
    return ShardedState({0: shard}, 1, shapes)


def _per_param(optimizer: DeepSpeedZeroOptimizer) -> dict[str, Any]:
    """The state dictionary of an unsharded optimizer, as views of the flat state."""
    inner, parts = optimizer.optimizer, optimizer.parts
    places = {
        id(parts.params[slot.index]): (layout, slot) for layout in parts.groups for slot in layout.slots
    }
    state: dict[int, dict[str, Any]] = {}
    groups = []
    index = 0
    for options, params in zip(inner.param_groups, optimizer.user_params, strict=True):
        master = options["params"][0]
        own = range(index, index + len(params))
        for index, param in zip(own, params, strict=True):
            if id(param) in places and inner.state.get(master):
                slot = places[id(param)][1]
                state[index] = {
                    name: value[slot.start : slot.end].view(param.shape)
                    if is_flat_state(value, master)
                    else value
                    for name, value in inner.state[master].items()
                }
        index = own.stop
        groups.append(
            {key: value for key, value in options.items() if key != "params"} | {"params": list(own)}
        )
    return with_stock_keys(inner, {"state": state, "param_groups": groups})


def _group_names(optimizer: DeepSpeedZeroOptimizer) -> list[list[str]]:
    """For each group its parameters' names in the client's order; those without state under a name of no
    parameter."""
    parts = optimizer.parts
    names = {id(param): parts.names[index] for index, param in parts.params.items()}
    return [
        [names.get(id(param), f"without state [{group}][{index}]") for index, param in enumerate(params)]
        for group, params in enumerate(optimizer.user_params)
    ]
