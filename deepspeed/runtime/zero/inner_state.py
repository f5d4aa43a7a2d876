"""State that an inner optimizer has before it is wrapped: from one entry a parameter to one a flat shard."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from deepspeed.runtime.zero.forms import write_flat
from deepspeed.runtime.zero.host_buffer import LedgerEntry, tensor_entry
from deepspeed.runtime.zero.layout import GroupLayout

logger = logging.getLogger("DeepSpeed")

State = dict[str, Any]


def adopt_state(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[GroupLayout],
    shard: int,
    params: Mapping[int, torch.nn.Parameter],
) -> None:
    """Move state kept by parameter to the flat masters, so that an optimizer goes on where it was.

    torch's Adagrad has state from construction, others when they were stepped or loaded before. Parameters'
    own entries are dropped: nothing reads them any more. A group whose parameters differ in what one shard
    can have only once, such as the number of steps, starts afresh, with a warning.

    Args:
        optimizer: its groups' `params` are the flat masters already.
        groups: layouts of the parameter groups.
        shard: which shard is this rank's.
        params: parameters by `slot.index`.
    """
    masters = [options["params"][0] for options in optimizer.param_groups]
    for index, (layout, master) in enumerate(zip(groups, masters, strict=True)):
        states = {slot.index: optimizer.state.get(params[slot.index]) for slot in layout.slots}
        kept: dict[int, State] = {index: state for index, state in states.items() if state}
        if not kept:
            continue
        shared = _shared_values(kept, params)
        if len(kept) < len(states) or shared is None:
            logger.warning(
                "optimizer: the parameters of group %d have taken different numbers of steps or hold "
                "different state; they start afresh",
                index,
            )
            continue
        adopted: State = optimizer.state[master]
        adopted.update(shared)
        for name in _elementwise_names(kept, params):
            moment = adopted.get(name)
            if moment is None:
                adopted[name] = moment = torch.zeros_like(master.data)
            for segment in layout.segments(*layout.shard_bounds(shard)):
                flat = kept[segment.slot.index][name].reshape(-1)
                source = flat[segment.param_start : segment.param_start + segment.numel]
                write_flat(moment, segment.offset, source)
    owned = {id(master) for master in masters}
    for key in [key for key in optimizer.state if id(key) not in owned]:
        del optimizer.state[key]


def state_entries(optimizer: torch.optim.Optimizer) -> Iterator[LedgerEntry]:
    """Name the state that an optimizer holds for its flat masters, scalars left out."""
    for index, group in enumerate(optimizer.param_groups):
        for master in group["params"]:
            for name, value in optimizer.state.get(master, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == master.shape:
                    yield tensor_entry(f"{name}[{index}]", value, "optimizer")


def _elementwise_names(kept: Mapping[int, State], params: Mapping[int, torch.nn.Parameter]) -> list[str]:
    """Names of state with one value an element; a step count is none, not even a scalar parameter's."""
    largest = max(kept, key=lambda index: params[index].numel())
    return [
        name
        for name, value in kept[largest].items()
        if name != "step" and isinstance(value, torch.Tensor) and value.shape == params[largest].shape
    ]


def _shared_values(kept: Mapping[int, State], params: Mapping[int, torch.nn.Parameter]) -> State | None:
    """State without elements, copied; None if the parameters do not agree on it."""
    first = next(iter(kept.values()))
    elementwise = _elementwise_names(kept, params)
    names = [name for name in first if name not in elementwise]
    for index, state in kept.items():
        shapes = [state[name].shape == params[index].shape for name in elementwise if name in state]
        if state.keys() != first.keys() or not all(shapes):
            return None
        if any(not _equal(state[name], first[name]) for name in names):
            return None
    return {name: _copied(first[name]) for name in names}


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(value, other)
    return bool(value == other)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
