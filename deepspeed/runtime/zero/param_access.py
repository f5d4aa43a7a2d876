"""Reading and writing one parameter's master, gradient and optimizer state, whoever owns its elements."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeGuard

import torch

from deepspeed.runtime.precision import LossScalerBase
from deepspeed.runtime.zero import collectives
from deepspeed.runtime.zero.collectives import Comm
from deepspeed.runtime.zero.forms import Flat, read_flat, write_flat
from deepspeed.runtime.zero.layout import ParamSlot
from deepspeed.runtime.zero.parts import ZeroParts

logger = logging.getLogger("DeepSpeed")


class _Run(NamedTuple):
    """A run of a parameter that one shard owns."""

    owner: int
    param_start: int
    shard_start: int
    numel: int


class ParamAccess:
    """Full views of sharded state, for `deepspeed.utils.safe_get_*` and `safe_set_*`.

    Reads are collective: every rank calls them for the same parameter, and each receives the whole. Writes
    take the whole value on every rank and keep what the rank owns; those of gradients are collective too.

    Args:
        parts: the optimizer's parts.
        comm: the ranks.
        optimizer: the inner optimizer, whose state is read and written.
        loss_scaler: what gradients are multiplied by.
    """

    def __init__(
        self, parts: ZeroParts, comm: Comm, optimizer: torch.optim.Optimizer, loss_scaler: LossScalerBase
    ) -> None:
        self._parts = parts
        self._comm = comm
        self._optimizer = optimizer
        self._loss_scaler = loss_scaler
        self._slots = {id(parts.params[slot.index]): slot for layout in parts.groups for slot in layout.slots}

    def attach(self) -> None:
        """Become the way to these parameters; an engine that trained them before gets no more gradients."""
        for previous in {id(access): access for access in map(_access_of, self._params()) if access}.values():
            previous.detach()
            logger.warning(
                "deepspeed.initialize: parameters of another engine; the new one trains them, the other "
                "gets no more gradients. Call destroy() on an engine that is not needed, to get its "
                "memory back."
            )
        for param in self._params():
            param._ds_accessor = weakref.ref(self)  # type: ignore[attr-defined]

    def detach(self) -> None:
        """Leave the parameters alone: no gradient is taken, and getters find nothing."""
        self._parts.reducer.close()
        for param in self._params():
            if _access_of(param) is self:
                del param._ds_accessor  # type: ignore[attr-defined]

    def get_full_fp32_param(self, param: torch.nn.Parameter) -> torch.Tensor:
        """The master of a parameter, in its shape, fp32, on its device. Collective."""
        slot = self._slots[id(param)]
        return self._gather(param, self._parts.master.masters[slot.group])

    def get_full_grad(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        """The reduced, unscaled gradient of a parameter, fp32; None between a step and the next backward.

        Collective.
        """
        if not self._parts.reducer.rounds:
            return None
        self._collect_late_grads(param)
        slot = self._slots[id(param)]
        return self._gather(param, self._parts.master.grads(slot.group)).div_(self._loss_scaler.loss_scale)

    def get_full_optimizer_state(self, param: torch.nn.Parameter, key: str) -> torch.Tensor | None:
        """A parameter's optimizer state, such as `exp_avg`, fp32; None if there is none of that name.

        Collective. What a whole group has once, such as `step`, comes as a tensor without dimensions.
        """
        slot = self._slots[id(param)]
        shard_state = self._state(slot).get(key)
        if self._is_elementwise(shard_state, slot):
            return self._gather(param, shard_state)
        return None if shard_state is None else torch.tensor(float(shard_state), device=param.device)

    def set_full_fp32_param(self, param: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Overwrite the master, and the low-precision weight with it."""
        self._parts.master.wait_readers()
        slot = self._slots[id(param)]
        self._scatter(param, value, self._parts.master.masters[slot.group])
        param.data.copy_(value.float().view_as(param))

    def set_full_grad(self, param: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Overwrite the reduced gradient; `value` is unscaled.

        Raises:
            RuntimeError: no gradient has been reduced since the last step.
        """
        if not self._parts.reducer.rounds:
            raise RuntimeError(
                "safe_set_full_grad: expected reduced gradients, got none since the last step. Call it after "
                "engine.backward(loss) of the last micro-batch and before engine.step()."
            )
        self._collect_late_grads(param)
        slot = self._slots[id(param)]
        flat = value.detach().reshape(-1)
        for run in self._runs(slot):
            if run.owner == self._parts.shard:
                piece = flat[run.param_start : run.param_start + run.numel] * self._loss_scaler.loss_scale
                self._parts.master.set_grads(slot.group, run.shard_start, piece)

    def set_full_optimizer_state(self, param: torch.nn.Parameter, value: torch.Tensor, key: str) -> None:
        """Overwrite a parameter's optimizer state.

        Raises:
            KeyError: the optimizer keeps no state of that name with one value an element.
        """
        slot = self._slots[id(param)]
        state = self._state(slot)
        names = sorted(name for name, held in state.items() if self._is_elementwise(held, slot))
        if key not in names:
            raise KeyError(f"optim_state_key: expected one of {names}, got {key!r}. Take a step first?")
        self._parts.master.wait_readers()
        self._scatter(param, value, state[key])

    def _collect_late_grads(self, param: torch.nn.Parameter) -> None:
        """Bring gradients that arrived after their bucket was launched to their owners, on any rank."""
        reducer = self._parts.reducer
        while collectives.all_reduce_sum([reducer.pending_count()], self._comm, param.device)[0]:
            reducer.flush()

    def refresh_masters(self) -> None:
        """Set every master from the parameters' present values."""
        self._parts.master.wait_readers()
        self._parts.master.refresh()

    def _params(self) -> Iterable[torch.nn.Parameter]:
        return self._parts.params.values()

    def _state(self, slot: ParamSlot) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state[self._optimizer.param_groups[slot.group]["params"][0]]
        return state

    def _is_elementwise(self, held: Any, slot: ParamSlot) -> TypeGuard[Flat]:
        return isinstance(held, Flat) and held.shape == self._parts.master.masters[slot.group].shape

    def _runs(self, slot: ParamSlot) -> Iterator[_Run]:
        layout = self._parts.groups[slot.group]
        for owner in range(layout.shards):
            low, high = layout.shard_bounds(owner)
            start, end = max(slot.start, low), min(slot.end, high)
            if start < end:
                yield _Run(owner, start - slot.start, start - low, end - start)

    def _gather(self, param: torch.nn.Parameter, shard: Flat) -> torch.Tensor:
        slot = self._slots[id(param)]
        full = torch.empty(slot.numel, dtype=torch.float32, device=param.device)
        for run in self._runs(slot):
            place = full[run.param_start : run.param_start + run.numel]
            if run.owner == self._parts.shard:
                place.copy_(read_flat(shard, run.shard_start, run.shard_start + run.numel))
            if self._parts.groups[slot.group].shards > 1:
                collectives.broadcast(place, run.owner, self._comm)
        return full.view_as(param)

    def _scatter(self, param: torch.nn.Parameter, value: torch.Tensor, shard: Flat) -> None:
        slot = self._slots[id(param)]
        flat = value.detach().reshape(-1)
        for run in self._runs(slot):
            if run.owner == self._parts.shard:
                write_flat(shard, run.shard_start, flat[run.param_start : run.param_start + run.numel])


def _access_of(param: torch.nn.Parameter) -> ParamAccess | None:
    """Who has a parameter at present."""
    reference: weakref.ref[ParamAccess] | None = getattr(param, "_ds_accessor", None)
    return reference() if reference is not None else None
