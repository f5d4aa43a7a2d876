"""The fp32 master shard on the device: ZeRO without offload, stages 0, 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch

from deepspeed.runtime.zero.change_gate import ChangeGate
from deepspeed.runtime.zero.forms import Flat
from deepspeed.runtime.zero.host_buffer import LedgerEntry, tensor_entry
from deepspeed.runtime.zero.inner_state import state_entries
from deepspeed.runtime.zero.layout import BucketItem, GroupLayout
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.publisher import Publisher, Target, copy_to_shard, publish_all


class DeviceMaster:
    """Master weights, gradients and optimizer state of this rank's shard, beside the parameters.

    The same verbs as `HostMaster`, on flat device tensors that any elementwise torch optimizer steps.
    Memory, bytes a parameter of the shard, on the device: 4 master + 4 gradient + the optimizer's state.

    Args:
        groups: layouts of the parameter groups.
        shard: which shard is this rank's.
        params: parameters by `slot.index`; the master starts from their values.
        optimizer: the inner optimizer; its groups' `params` become the flat masters.
        device: where the shard lives.
    """

    def __init__(
        self,
        groups: Sequence[GroupLayout],
        shard: int,
        params: Mapping[int, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> None:
        self._optimizer = optimizer
        self._masters: list[torch.nn.Parameter] = []  # each [shard_numel] fp32, device
        self._grads: list[torch.Tensor] = []  # each [shard_numel] fp32, device
        self._arrived: set[tuple[int, int]] = set()  # (group, shard_start), this step
        self._device = device
        self._away: list[torch.Tensor] = []  # what `move_to_host` moved and `move_back` has not returned
        self._copies: list[Callable[[torch.Tensor], None]] = []  # from the parameters to a master
        for layout, options in zip(groups, optimizer.param_groups, strict=True):
            master = torch.empty(layout.shard_numel(shard), dtype=torch.float32, device=device)
            # Without the tensor: it would live on in here when the master's is another one, or none.
            self._copies.append(partial(copy_to_shard, layout, shard, params))
            self._copies[-1](master)
            self._masters.append(torch.nn.Parameter(master))
            self._grads.append(torch.zeros_like(master))
            options["params"] = [self._masters[-1]]

    @property
    def masters(self) -> list[Flat]:
        """The flat fp32 masters, one a group, `[shard_numel]`."""
        return [master.data for master in self._masters]

    def grads(self, group: int) -> torch.Tensor:
        """A group's gradient, `[shard_numel]` fp32: the mean over ranks, times the loss scale."""
        return self._grads[group]

    def load_grads(self, items: Sequence[BucketItem], flat: torch.Tensor) -> None:
        """Take a reduced slice: store it, or add it to what this step has brought already.

        Args:
            items: what the slice holds, in order.
            flat: `[sum of numels]`, any floating dtype, device.
        """
        base = items[0].bucket_start
        for item in items:
            piece = flat[item.bucket_start - base : item.bucket_start - base + item.numel]
            place = self._grads[item.slot.group][item.shard_start : item.shard_start + item.numel]
            key = (item.slot.group, item.shard_start)
            if key in self._arrived:
                place.add_(piece)
            else:
                place.copy_(piece)
                self._arrived.add(key)

    def sum_of_squares(self) -> float:
        """Sum of squares of the shard's gradients; not finite if any element is not."""
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in self._grads if grad.numel()]
        return math.fsum(torch.stack(norms).square().tolist()) if norms else 0.0

    def set_grads(self, group: int, start: int, value: torch.Tensor) -> None:
        """Overwrite a run of gradients, `[n]`."""
        self._grads[group][start : start + value.numel()].copy_(value)

    def scale_grads(self, factor: float) -> None:
        """Multiply the gradients in place."""
        for grad in self._grads:
            grad.mul_(factor)

    def step(self, factor: float, publisher: Publisher) -> None:
        """Update masters and state from the gradients times `factor`, and publish the weights."""
        if factor != 1.0:
            self.scale_grads(factor)
        for master, grad in zip(self._masters, self._grads, strict=True):
            master.grad = grad
        self._optimizer.step()
        for master in self._masters:
            master.grad = None
        self.publish(publisher)
        self.clear_grads()

    def publish(self, publisher: Publisher) -> None:
        """Bring the masters' present values to the parameters, without a step."""
        publish_all(publisher, len(self._masters), self._copy_target)

    def refresh(self) -> None:
        """Set the masters from the parameters' present values."""
        for copy, master in zip(self._copies, self._masters, strict=True):
            copy(master.data)

    def clear_grads(self) -> None:
        """Forget the gradients: the next contribution is the first of its step."""
        self._arrived.clear()

    def move_to_host(self, kinds: Collection[OffloadStateTypeEnum]) -> bool:
        """Give the device's memory to somebody else for a while.

        Args:
            kinds: what to move; gradients of either name are the shard's.

        Returns:
            True: nothing can be computed before `move_back`.
        """
        tensors: list[torch.Tensor] = []
        if OffloadStateTypeEnum.hp_params in kinds:
            tensors += self._masters
        if not {OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer}.isdisjoint(kinds):
            tensors += self._grads
        if OffloadStateTypeEnum.optim_states in kinds:
            values = [value for state in self._optimizer.state.values() for value in state.values()]
            tensors += [value for value in values if isinstance(value, torch.Tensor)]
        for tensor in tensors:
            if tensor.device.type != "cpu":
                tensor.data = tensor.data.cpu()
                self._away.append(tensor)
        return True

    def move_back(self) -> None:
        """Return what `move_to_host` moved."""
        for tensor in self._away:
            tensor.data = tensor.data.to(self._device)
        self._away.clear()

    def guard(self, gate: ChangeGate) -> bool:
        """Refuse: what is on the device is saved before training goes on."""
        return False

    def wait_readers(self) -> None:
        """Nobody reads beside training."""

    def buffers(self) -> Iterator[LedgerEntry]:
        """Masters, gradients and state, where they are now."""
        for index, (master, grad) in enumerate(zip(self._masters, self._grads, strict=True)):
            for name, tensor in (("master", master), ("gradient", grad)):
                yield tensor_entry(f"{name}[{index}]", tensor, type(self).__name__)
        yield from state_entries(self._optimizer)

    def close(self) -> None:
        """Free the memory."""
        for master in self._masters:
            self._optimizer.state.pop(master, None)
            master.data = torch.empty(0)
        self._grads.clear()
        self._away.clear()

    def _copy_target(self, index: int, target: Target) -> None:
        """Round a run of the master to the weight's dtype."""
        target.out.copy_(self._masters[index].data[target.start : target.end])
