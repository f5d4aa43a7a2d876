"""What a rank's optimizer file holds: its shard, under stock's keys, as plain values.

Stock pickles a few objects of its own here: the loss scaler, an enumeration, slices of parameters. Plain
values take their place, which stock's loader accepts, except for the loss scaler: a key of stock's that is
absent leaves its own scaler as configured, and ours is kept under a key of our own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.checkpoint.names import FORMAT_VERSION
from deepspeed.runtime.checkpoint.torch_file import TensorSource
from deepspeed.runtime.zero.forms import Flat
from deepspeed.runtime.zero.layout import GroupLayout
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

LOSS_SCALER = "loss_scaler_state"


def optim_states(optimizer: DeepSpeedZeroOptimizer, clip_grad: float, ds_config: Any) -> dict[str, Any]:
    """The content of this rank's optimizer file at stages 1 and 2.

    Args:
        optimizer: whose shard it is.
        clip_grad: the configured norm.
        ds_config: the configuration as it was passed, plain.
    """
    parts = optimizer.parts
    world = parts.groups[0].shards if parts.groups else 1
    state = {
        LOSS_SCALER: optimizer.loss_scaler.state_dict(),
        "dynamic_loss_scale": optimizer.loss_scaler.dynamic,
        "overflow": optimizer.overflow,
        "clip_grad": clip_grad,
        "base_optimizer_state": inner_state(optimizer),
        "single_partition_of_fp32_groups": [TensorSource(master) for master in parts.master.masters],
        "zero_stage": optimizer.stage,
        "group_paddings": [layout.shard_extent - layout.shard_numel(parts.shard) for layout in parts.groups],
        "param_alignment_paddings": [[0] * len(layout.slots) for layout in parts.groups],
        "partition_count": [world] * len(parts.groups),
        "ds_version": FORMAT_VERSION,
        "param_slice_mappings": [_slices(optimizer, layout) for layout in parts.groups],
    }
    return {"optimizer_state_dict": state, "ds_config": ds_config, "ds_version": FORMAT_VERSION}


def inner_state(optimizer: DeepSpeedZeroOptimizer) -> dict[str, Any]:
    """The inner optimizer's state, its flat tensors padded to the shard's extent as stock's are."""
    inner, parts = optimizer.optimizer, optimizer.parts
    state, groups = {}, []
    for index, (layout, group) in enumerate(zip(parts.groups, inner.param_groups, strict=True)):
        master = group["params"][0]
        entries = {
            name: TensorSource(value, layout.shard_extent) if is_flat_state(value, master) else value
            for name, value in inner.state.get(master, {}).items()
        }
        if entries:
            state[index] = entries
        groups.append({key: value for key, value in group.items() if key != "params"} | {"params": [index]})
    return with_stock_keys(inner, {"state": state, "param_groups": groups})


def optim_lanes(content: Mapping[str, Any]) -> list[list[TensorSource]]:
    """For each group what a step changes together: its master and the state that is as long.

    Args:
        content: what `optim_states` returned.
    """
    state = content["optimizer_state_dict"]
    entries = state["base_optimizer_state"]["state"]
    return [
        [master, *(value for value in entries.get(group, {}).values() if isinstance(value, TensorSource))]
        for group, master in enumerate(state["single_partition_of_fp32_groups"])
    ]


def is_flat_state(value: Any, master: torch.Tensor) -> bool:
    """Whether an entry of an optimizer's state has one element for each element of the master."""
    return isinstance(value, Flat) and value.shape == master.shape


def with_stock_keys(inner: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Add what stock's FusedAdam expects in a file and torch's does not keep; steps as whole numbers."""
    if isinstance(inner, FusedAdam):
        for entries in state_dict["state"].values():
            entries["step"] = int(entries["step"])
        for group in state_dict["param_groups"]:
            group.setdefault("bias_correction", True)
            group.setdefault("step", 0)
    return state_dict


def _slices(optimizer: DeepSpeedZeroOptimizer, layout: GroupLayout) -> OrderedDict[str, dict[str, int]]:
    """Name -> place in the shard, of each parameter that the shard has a part of."""
    parts = optimizer.parts
    return OrderedDict(
        (parts.names[segment.slot.index], {"numel": segment.numel, "start": segment.offset})
        for segment in layout.segments(*layout.shard_bounds(parts.shard))
    )
