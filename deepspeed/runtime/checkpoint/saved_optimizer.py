"""The optimizer state of a checkpoint, by parameter name, whatever number of ranks wrote it.

Nothing here copies more than it is asked for: tensors are views of mapped files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from deepspeed.runtime.checkpoint.names import CheckpointError
from deepspeed.runtime.zero.layout import GroupLayout, ParamSlot

# Asks for the fp32 master where others name an entry of the optimizer's state.
MASTER = "single_partition_of_fp32_groups"


class SavedOptimizer(Protocol):
    """What a loader asks of a checkpoint's optimizer state. `group` counts parameter groups."""

    @property
    def options(self) -> Sequence[Mapping[str, Any]]:
        """For each group its settings, learning rate and the like."""

    def numels(self, group: int) -> Mapping[str, int]:
        """Name -> elements of the group's parameters."""

    def flat_dtypes(self, group: int) -> Mapping[str, torch.dtype]:
        """Entries of the state that have one element for each of the parameters'; empty before the first
        step."""

    def scalars(self, group: int) -> Mapping[str, Any]:
        """Entries of the state that belong to the whole group, such as the step."""

    def copy(self, key: str, group: int, name: str, start: int, out: torch.Tensor) -> None:
        """Copy elements `[start, start + n)` of a parameter's entry, or of its master, to `out`, `[n]`."""


class ShardedState:
    """State as ranks wrote it at stages 1 and 2: flat groups cut into shards. Stage 0: one shard.

    Args:
        shards: by rank, what `optimizer_state_dict` held. Ranks may be missing whose parts are not asked for.
        world: number of ranks that wrote.
        shapes: for each group name -> shape, in the flat order of the group.
    """

    def __init__(
        self,
        shards: Mapping[int, Mapping[str, Any]],
        world: int,
        shapes: Sequence[Mapping[str, Sequence[int]]],
    ) -> None:
        self._shards = shards
        self._first = shards[min(shards)]
        orders = [_flat_order(shards, group, list(named)) for group, named in enumerate(shapes)]
        self._slots: list[dict[str, ParamSlot]] = []
        self._layouts: list[GroupLayout] = []
        for group, (order, named) in enumerate(zip(orders, shapes, strict=True)):
            slots, start = {}, 0
            for index, name in enumerate(order):
                numel = torch.Size(named[name]).numel()
                slots[name] = ParamSlot(index, group, start, numel)
                start += numel
            self._slots.append(slots)
            self._layouts.append(GroupLayout(tuple(slots.values()), world))
        self._check_extents()

    @property
    def options(self) -> Sequence[Mapping[str, Any]]:
        """See `SavedOptimizer`."""
        return self._first["base_optimizer_state"]["param_groups"]

    def numels(self, group: int) -> Mapping[str, int]:
        """See `SavedOptimizer`."""
        return {name: slot.numel for name, slot in self._slots[group].items()}

    def flat_dtypes(self, group: int) -> Mapping[str, torch.dtype]:
        """See `SavedOptimizer`."""
        return {k: v.dtype for k, v in self._state(min(self._shards), group).items() if _is_flat(v)}

    def scalars(self, group: int) -> Mapping[str, Any]:
        """See `SavedOptimizer`."""
        return {k: v for k, v in self._state(min(self._shards), group).items() if not _is_flat(v)}

    def copy(self, key: str, group: int, name: str, start: int, out: torch.Tensor) -> None:
        """See `SavedOptimizer`."""
        extent = self._layouts[group].shard_extent
        position, end = (
            self._slots[group][name].start + start,
            self._slots[group][name].start + start + out.numel(),
        )
        done = 0
        while position < end:
            rank, offset = divmod(position, extent)
            numel = min(extent - offset, end - position)
            out[done : done + numel].copy_(self._tensor(key, rank, group)[offset : offset + numel])
            position += numel
            done += numel

    def tensor(self, key: str, group: int, name: str) -> torch.Tensor:
        """A parameter's entry, flat: a view of the file if one rank wrote it all, else put together."""
        slot, extent = self._slots[group][name], self._layouts[group].shard_extent
        rank, offset = divmod(slot.start, extent)
        source = self._tensor(key, rank, group)
        if offset + slot.numel <= source.numel():
            return source[offset : offset + slot.numel]
        out = torch.empty(slot.numel, dtype=source.dtype)
        self.copy(key, group, name, 0, out)
        return out

    def ranks_of(self, group: int, name: str, start: int, numel: int) -> range:
        """The ranks that wrote a part of a parameter."""
        extent = self._layouts[group].shard_extent
        position = self._slots[group][name].start + start
        return range(position // extent, (position + numel - 1) // extent + 1)

    def order_is_known(self) -> bool:
        """Whether the slices that the files name lie where the flat order says."""
        for rank, shard in self._shards.items():
            for group, saved in enumerate(shard.get("param_slice_mappings") or ()):
                layout, names = self._layouts[group], list(self._slots[group])
                expected = {
                    names[segment.slot.index]: (segment.offset, segment.numel)
                    for segment in layout.segments(*layout.shard_bounds(rank))
                }
                if {name: _slice_of(piece) for name, piece in saved.items()} != expected:
                    return False
        return True

    def _state(self, rank: int, group: int) -> Mapping[str, Any]:
        return self._shards[rank]["base_optimizer_state"]["state"].get(group, {})

    def _tensor(self, key: str, rank: int, group: int) -> torch.Tensor:
        shard = self._shards[rank]
        return shard[MASTER][group] if key == MASTER else self._state(rank, group)[key]

    def _check_extents(self) -> None:
        """Every tensor holds at least what its shard owns, and at most the padding more."""
        for rank, shard in self._shards.items():
            for group, layout in enumerate(self._layouts):
                tensors = {MASTER: shard[MASTER][group]}
                tensors |= {
                    name: value for name, value in self._state(rank, group).items() if _is_flat(value)
                }
                for name, tensor in tensors.items():
                    if not layout.shard_numel(rank) <= tensor.numel() <= layout.shard_extent:
                        raise CheckpointError(
                            f"{name}[{group}] of rank {rank}: expected {layout.shard_numel(rank)} elements "
                            f"and at most {layout.shard_extent} with padding, got {tensor.numel()}. "
                            "The file does not belong to the model file beside it."
                        )


class PerParamState:
    """State as an unsharded fp32 optimizer keeps it: one entry a parameter, whose weight is the master.

    Args:
        saved: the inner optimizer's `state_dict()`. names: for each group, the parameters' names in the order
        of the optimizer's group, frozen ones included. weights: the model's.
    """

    def __init__(
        self, saved: Mapping[str, Any], names: Sequence[Sequence[str]], weights: Mapping[str, torch.Tensor]
    ) -> None:
        self._saved = saved
        self._weights = weights
        self._index: list[dict[str, int]] = []
        for group, (options, named) in enumerate(zip(saved["param_groups"], names, strict=True)):
            if len(options["params"]) != len(named):
                raise CheckpointError(
                    f"param_groups[{group}]: expected {len(named)} parameters, got {len(options['params'])}. "
                    "Load it into the same groups."
                )
            self._index.append(dict(zip(named, options["params"], strict=True)))

    @property
    def options(self) -> Sequence[Mapping[str, Any]]:
        """See `SavedOptimizer`."""
        return self._saved["param_groups"]

    def numels(self, group: int) -> Mapping[str, int]:
        """See `SavedOptimizer`."""
        return {name: self._weights[name].numel() for name in self._index[group] if name in self._weights}

    def flat_dtypes(self, group: int) -> Mapping[str, torch.dtype]:
        """See `SavedOptimizer`."""
        return {name: value.dtype for name, value in self._sample(group).items() if _is_entry(value)}

    def scalars(self, group: int) -> Mapping[str, Any]:
        """See `SavedOptimizer`."""
        return {name: value for name, value in self._sample(group).items() if not _is_entry(value)}

    def copy(self, key: str, group: int, name: str, start: int, out: torch.Tensor) -> None:
        """See `SavedOptimizer`."""
        if key == MASTER:
            tensor = self._weights[name]
        else:
            entry = self._saved["state"].get(self._index[group][name])
            tensor = torch.zeros_like(out) if entry is None else entry[key]
            start = 0 if entry is None else start
        out.copy_(tensor.reshape(-1)[start : start + out.numel()])

    def _sample(self, group: int) -> Mapping[str, Any]:
        """The state of the group's parameter that has stepped most often."""
        entries = [self._saved["state"][i] for i in self._index[group].values() if i in self._saved["state"]]
        return max(entries, key=lambda entry: float(entry.get("step", 0)), default={})


def _is_flat(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


def _is_entry(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _slice_of(piece: Any) -> tuple[int, int]:
    """Start and length of a slice, stock's object or our dict."""
    fields = piece if isinstance(piece, Mapping) else vars(piece)
    return int(fields["start"]), int(fields["numel"])


def _flat_order(shards: Mapping[int, Mapping[str, Any]], group: int, names: list[str]) -> list[str]:
    """The parameters' order in a group's flat buffer: as the files' slices say, else the order of the shapes.

    They differ when stock had dealt parameters out in turn (`round_robin_gradients`).
    """
    mappings = [shards[rank].get("param_slice_mappings") or () for rank in sorted(shards)]
    if not all(mappings):
        return names
    met = dict.fromkeys(name for mapping in mappings for name in mapping[group])
    # A subset of the files may leave parameters out: only a complete order is one.
    return list(met) if len(met) == len(names) else names
