"""Master and moments of one parameter group's shard, in host memory, each in its form."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from types import ModuleType

import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.adam.cpu_adam import AdamSlice
from deepspeed.runtime.zero.forms import (
    BLOCK_NUMEL,
    TIE_BITS,
    EncodedFlat,
    Flat,
    MasterForm,
    MomentForm,
    QuantizedMoment,
    StateForms,
)
from deepspeed.runtime.zero.host_buffer import HostBuffer, Ledger
from deepspeed.runtime.zero.layout import GroupLayout
from deepspeed.runtime.zero.publisher import Target, copy_from_shard, copy_to_shard

_MOMENTS = ("exp_avg", "exp_avg_sq")


class HostShard:
    """What the host keeps of a group's shard beside its gradient.

    Memory, bytes a parameter of the shard: master 4, or 2.125 as `bf16_residual`; both moments together 8, or
    4 as bf16, or 2.03 as int8.
    Lifetime: from initialization to `release`.

    Args:
        index: the group's number.
        layout: the group's layout.
        shard: which shard is this rank's.
        params: parameters by `slot.index`; the master starts from their values.
        forms: what is kept in which form.
        ledger: counts every buffer.
        op: the compiled host kernels.
    """

    def __init__(
        self,
        index: int,
        layout: GroupLayout,
        shard: int,
        params: Mapping[int, torch.nn.Parameter],
        forms: StateForms,
        ledger: Ledger,
        op: ModuleType,
    ) -> None:
        self._index = index
        self._layout = layout
        self._shard = shard
        self._params = params
        self._forms = forms
        self._ledger = ledger
        self._op = op
        self._buffers: list[HostBuffer] = []
        self.numel = layout.shard_numel(shard)
        # [numel] fp32, or what reads like it
        self.master: Flat = self._make_master()
        # What the inner optimizer sees: the master, or a stand-in of its shape that holds nothing.
        stand_in = torch.zeros(1).expand(self.numel)
        self.param = torch.nn.Parameter(self.master if isinstance(self.master, torch.Tensor) else stand_in)

    def init_moments(self, optimizer: DeepSpeedCPUAdam) -> None:
        """Create zeroed moments as the optimizer's state of this shard."""
        if self._forms.moments is MomentForm.int8:
            optimizer.state[self.param] = {"step": 0, **{name: self._quantized(name) for name in _MOMENTS}}
            return
        dtype = torch.bfloat16 if self._forms.moments is MomentForm.bf16 else None
        optimizer.init_state(self.param, lambda name, numel, own: self._zeros(name, numel, dtype or own))

    def slice(self, optimizer: DeepSpeedCPUAdam, target: Target, grad: torch.Tensor) -> AdamSlice:
        """What the kernel takes to update a run of the shard.

        Args:
            optimizer: holds the moments.
            target: which elements, and where their weights are written; they are read there too if the master
                is the residual.
            grad: `[end - start]`.
        """
        start, end = target.start, target.end
        state = optimizer.state[self.param]
        residual = self.master if isinstance(self.master, ResidualMaster) else None
        moments, scales = [], []
        for name in _MOMENTS:
            moment = state[name]
            codes, scale = moment.part(start, end) if isinstance(moment, QuantizedMoment) else (None, None)
            moments.append(moment[start:end] if codes is None else codes)
            scales.append(scale)
        noise_key = self._noise_key(state["step"]) if self._forms.moments is MomentForm.bf16 else -1
        first = self._layout.shard_bounds(self._shard)[0] + start
        return AdamSlice(
            master=residual.rest[start:end] if residual is not None else self.param.data[start:end],
            grad=grad,
            exp_avg=moments[0],
            exp_avg_sq=moments[1],
            out=target.out,
            ties=residual.ties_of(start, end) if residual is not None else None,
            exp_avg_scale=scales[0],
            exp_avg_sq_scale=scales[1],
            noise_key=noise_key,
            first=first % (1 << 32),
        )

    def write_weights(self, target: Target) -> None:
        """Round a run of the master to the weight's dtype; a residual's weights are there already."""
        if isinstance(self.master, torch.Tensor):
            target.out.copy_(self.master[target.start : target.end])

    def refresh(self) -> None:
        """Set the master from the parameters' present values."""
        if isinstance(self.master, ResidualMaster):
            self.master.zero_rest()
        else:
            assert isinstance(self.master, torch.Tensor)
            copy_to_shard(self._layout, self._shard, self._params, self.master)

    def release(self) -> None:
        """Return the memory to the system."""
        self.master = self.param.data = torch.empty(0)
        for buffer in self._buffers:
            buffer.release()

    def _make_master(self) -> Flat:
        if self._forms.master is MasterForm.fp32:
            master = self._buffer("master", self.numel, torch.float32).tensor
            copy_to_shard(self._layout, self._shard, self._params, master)
            return master
        rest = self._zeros("residual", self.numel, torch.int16)
        ties = self._zeros("ties", -(-self.numel // TIE_BITS), torch.int16)
        return ResidualMaster(rest, ties, self._layout, self._shard, self._params, self._op)

    def _quantized(self, name: str) -> QuantizedMoment:
        codes = self._zeros(name, self.numel, torch.uint8)
        scale = self._zeros(f"{name}_scale", -(-self.numel // BLOCK_NUMEL), torch.float32)
        return QuantizedMoment(codes, scale, name == "exp_avg", self._op)

    def _zeros(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._buffer(name, numel, dtype).fill_zero().tensor

    def _buffer(self, name: str, numel: int, dtype: torch.dtype) -> HostBuffer:
        """A buffer of this group, counted until `release`."""
        owner = type(self).__name__
        self._buffers.append(HostBuffer(f"{name}[{self._index}]", numel, dtype, self._ledger, owner=owner))
        return self._buffers[-1]

    def _noise_key(self, step: int) -> int:
        """32 bits that no other step or group has, whatever the number of ranks."""
        return zlib.crc32(struct.pack("<3q", self._forms.seed, step, self._index))


class ResidualMaster(EncodedFlat):
    """fp32 masters of which the device's bf16 weight is the upper half.

    Goal: 2.125 bytes a parameter instead of 4, and the same bits: the weight is the master rounded to nearest
    even, and the rest, a signed number of 16 bits, is what that rounding took away. Masters halfway between
    two weights that were rounded down differ by 0x8000, one more than 16 bits hold: a bit of their own says
    so. A weight that somebody changes changes its master with it.

    Args:
        rest: `[numel]` int16, host.
        ties: `[ceil(numel / 16)]` int16, host.
        layout: the group's layout.
        shard: which shard it is.
        params: parameters by `slot.index`, bf16.
        op: the compiled host kernels.
    """

    def __init__(
        self,
        rest: torch.Tensor,
        ties: torch.Tensor,
        layout: GroupLayout,
        shard: int,
        params: Mapping[int, torch.nn.Parameter],
        op: ModuleType,
    ) -> None:
        super().__init__(rest.numel())
        self.rest = rest
        self._ties = ties
        self._layout = layout
        self._shard = shard
        self._params = params
        self._op = op

    def ties_of(self, start: int, end: int) -> torch.Tensor:
        """The bits of elements `[start, end)`; `start` is a multiple of the block."""
        return self._ties[start // TIE_BITS : -(-end // TIE_BITS)]

    def zero_rest(self) -> None:
        """Let the masters be exactly the weights."""
        self.rest.zero_()
        self._ties.zero_()

    def _decode(self, start: int, end: int) -> torch.Tensor:
        weights = torch.empty(end - start, dtype=torch.bfloat16)
        copy_to_shard(self._layout, self._shard, self._params, weights, start)
        values = torch.empty(end - start)
        self._op.join_master(self.rest[start:end], weights, self.ties_of(start, end), values)
        return values

    def _encode(self, start: int, values: torch.Tensor) -> None:
        end = start + values.numel()
        weights = torch.empty(values.numel(), dtype=torch.bfloat16)
        self._op.split_master(values, self.rest[start:end], weights, self.ties_of(start, end))
        copy_from_shard(self._layout, self._shard, self._params, weights, start)
