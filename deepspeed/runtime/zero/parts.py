"""What a ZeRO optimizer is composed of, and the one place that decides which parts."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.adam.host_threads import (
    host_threads,
    threads_beside_backward,
    threads_beside_launches,
)
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.runtime.zero.buckets import BucketPool, GradReducer
from deepspeed.runtime.zero.change_gate import ChangeGate
from deepspeed.runtime.zero.collectives import Comm
from deepspeed.runtime.zero.device_master import DeviceMaster
from deepspeed.runtime.zero.forms import Flat, MasterForm
from deepspeed.runtime.zero.host_buffer import HostBuffer, Ledger, LedgerEntry
from deepspeed.runtime.zero.host_master import HostMaster, HostSettings
from deepspeed.runtime.zero.inner_state import adopt_state
from deepspeed.runtime.zero.layout import BucketItem, GroupLayout, plan_buckets, plan_groups
from deepspeed.runtime.zero.needs import (
    Facts,
    bucket_numel_limit,
    host_grad_dtype,
    overlap_depth,
    ring_shape,
    state_names,
    tile_numel,
)
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.preflight import check_memory
from deepspeed.runtime.zero.publisher import ParamPublisher, Publisher, params_dtype
from deepspeed.runtime.zero.ring import Downloader, StagingRing
from deepspeed.runtime.zero.settings import ZeroSettings
from deepspeed.runtime.zero.staging import UploadPublisher


class Master(Protocol):
    """The four verbs of a master shard, and what goes with them. See `HostMaster`."""

    @property
    def masters(self) -> list[Flat]: ...

    def grads(self, group: int) -> torch.Tensor: ...

    def load_grads(self, items: Sequence[BucketItem], flat: torch.Tensor) -> None: ...

    def sum_of_squares(self) -> float: ...

    def set_grads(self, group: int, start: int, value: torch.Tensor) -> None: ...

    def scale_grads(self, factor: float) -> None: ...

    def step(self, factor: float, publisher: Publisher) -> None: ...

    def publish(self, publisher: Publisher) -> None: ...

    def refresh(self) -> None: ...

    def clear_grads(self) -> None: ...

    def move_to_host(self, kinds: Collection[OffloadStateTypeEnum]) -> bool: ...

    def move_back(self) -> None: ...

    def guard(self, gate: ChangeGate) -> bool: ...

    def wait_readers(self) -> None: ...

    def buffers(self) -> Iterator[LedgerEntry]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ZeroParts:
    """The parts, connected.

    Args:
        params: parameters by `slot.index`, in model order.
        names: their names, by `slot.index`.
        groups: layouts of the parameter groups.
        shard: this rank's shard.
        ledger: counts host buffers.
        master: the shard.
        publisher: brings weights to the parameters.
        reducer: brings gradients to their owners.
        wire_dtype: element type of gradients on the wire.
        closers: what else holds memory or a thread.
    """

    params: Mapping[int, torch.nn.Parameter]
    names: Mapping[int, str]
    groups: Sequence[GroupLayout]
    shard: int
    ledger: Ledger
    master: Master
    publisher: Publisher
    reducer: GradReducer
    wire_dtype: torch.dtype
    closers: Sequence[Any]

    def buffers(self) -> Iterator[LedgerEntry]:
        """Every buffer that these parts hold now, on the host and on the device."""
        yield from self.ledger
        yield from self.master.buffers()
        yield from self.reducer.buffers()

    def close(self) -> None:
        """Detach from the parameters and return all memory."""
        self.reducer.close()
        self.master.close()
        for part in self.closers:
            part.close()


def build_parts(
    optimizer: torch.optim.Optimizer,
    model_params: Sequence[tuple[str, torch.nn.Parameter]],
    settings: ZeroSettings,
    comm: Comm,
) -> ZeroParts:
    """Lay out, allocate and connect.

    Args:
        optimizer: the inner optimizer, over the model's parameters.
        model_params: the model's `(name, parameter)` pairs in model order.
        settings: how to shard, reduce and keep.
        comm: the data-parallel ranks.
    """
    members = _members(optimizer, model_params)
    params = {index: param for group in members for index, param in group}
    names = {
        index: model_params[index][0] if index < len(model_params) else f"param[{index}]" for index in params
    }
    shards = comm.world if settings.stage > 0 else 1
    groups = plan_groups([[(index, param.numel()) for index, param in group] for group in members], shards)
    shard = comm.rank if shards > 1 else 0
    wire_dtype = settings.wire_dtype or _common_dtype(list(params.values()))
    ledger = Ledger()
    if not settings.forms.are_default:
        check_forms(optimizer, params, settings)
    check_accumulation(optimizer, settings)
    plans = plan_buckets(groups, bucket_numel_limit(settings)) if params else []
    dtypes = [params_dtype(layout, params) for layout in groups if layout.slots]
    facts = Facts(
        shard_numels=[layout.shard_numel(shard) for layout in groups],
        full_numel=sum(layout.full_numel for layout in groups),
        world=comm.world,
        weight_dtype=max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.bfloat16),
        wire_dtype=wire_dtype,
        bucket_numel=max((plan.numel for plan in plans), default=0),
        bucket_count=len(plans),
        state_names=state_names(optimizer),
        is_fused=isinstance(optimizer, DeepSpeedCPUAdam),
    )
    check_memory(settings, facts, comm)
    master, publisher, closers = _build_master(optimizer, params, groups, settings, comm, facts, ledger)
    adopt_state(optimizer, groups, shard, params)
    lend = partial(_host_bucket, facts.bucket_numel, wire_dtype, ledger)
    pool = BucketPool(wire_dtype, settings.device, lend)
    reducer = GradReducer(
        plans, params, comm, master.load_grads, pool, overlap_depth(settings, comm.world) > 0
    )
    return ZeroParts(params, names, groups, shard, ledger, master, publisher, reducer, wire_dtype, closers)


def _build_master(
    optimizer: torch.optim.Optimizer,
    params: Mapping[int, torch.nn.Parameter],
    groups: Sequence[GroupLayout],
    settings: ZeroSettings,
    comm: Comm,
    facts: Facts,
    ledger: Ledger,
) -> tuple[Master, Publisher, list[Any]]:
    """The shard, what brings its weights to the parameters, and what else is to be closed."""
    shards = groups[0].shards if groups else 1
    shard = comm.rank if shards > 1 else 0
    forms, on_host = settings.forms, settings.device.type == "cpu"
    whole_chunks = not forms.are_default and on_host
    from_device = ParamPublisher(groups, params, comm, tile_numel(settings, shards), whole_chunks)
    if not settings.offload:
        return DeviceMaster(groups, shard, params, optimizer, settings.device), from_device, []
    publisher: Publisher = from_device
    downloader, closers = None, []
    if settings.device.type == "cuda":
        slots, slot_nbytes = ring_shape(settings, shards, facts.weight_dtype)
        ring = StagingRing(slot_nbytes, settings.pin_memory, ledger, slots)
        reads_weights = forms.master is MasterForm.bf16_residual
        dtypes = [params_dtype(layout, params) for layout in groups]
        publisher = UploadPublisher(from_device, dtypes, ring, settings.device, reads_weights)
        downloader = Downloader(ring, settings.device)
        closers = [ring]
    host = _host_settings(optimizer, settings, facts.wire_dtype, ledger)
    master = HostMaster(groups, shard, params, optimizer, host, CPUAdamBuilder().load(), downloader)
    if downloader is not None:
        weakref.finalize(master, downloader.close)  # an engine may be dropped without destroy()
    return master, publisher, closers


def _host_bucket(numel: int, dtype: torch.dtype, ledger: Ledger) -> HostBuffer:
    """A bucket in host memory; pages become resident as buckets use them."""
    return HostBuffer("bucket", numel, dtype, ledger, owner=BucketPool.__name__)


def _members(
    optimizer: torch.optim.Optimizer, model_params: Sequence[tuple[str, torch.nn.Parameter]]
) -> list[list[tuple[int, torch.nn.Parameter]]]:
    """For each group its `(model index, parameter)` pairs; frozen and empty parameters are left out."""
    index_of = {id(param): index for index, (_, param) in enumerate(model_params)}
    members: list[list[tuple[int, torch.nn.Parameter]]] = []
    for group in optimizer.param_groups:
        members.append([])
        for param in group["params"]:
            index = index_of.setdefault(id(param), len(index_of))
            if param.requires_grad and param.numel():
                if not param.is_contiguous():
                    param.data = param.data.contiguous()
                members[-1].append((index, param))
    return members


def check_forms(
    optimizer: torch.optim.Optimizer, params: Mapping[int, torch.nn.Parameter], settings: ZeroSettings
) -> None:
    """Refuse smaller forms where they cannot hold.

    Raises:
        ValueError: they need our Adam, compiled, or the residual needs bf16 weights.
    """
    forms, section = settings.forms, "zero_optimization.offload_optimizer"
    key, value = "optimizer_states", forms.moments.value
    if forms.master is not MasterForm.fp32:
        key, value = "master_weights", forms.master.value
    if not isinstance(optimizer, DeepSpeedCPUAdam):
        raise ValueError(
            f'{section}.{key}: expected "fp32" with {type(optimizer).__name__}, got "{value}". Use Adam or '
            "AdamW of the configuration, or DeepSpeedCPUAdam."
        )
    if not hasattr(CPUAdamBuilder().load(), "encode_moment"):
        raise ValueError(
            f'{section}.{key}: expected "fp32" with DS_CPU_ADAM=torch, got "{value}". The op in plain torch '
            "knows no other form; install a C++ compiler and unset DS_CPU_ADAM."
        )
    others = {param.dtype for param in params.values()} - {torch.bfloat16}
    if forms.master is MasterForm.bf16_residual and others:
        raise ValueError(
            f'{section}.master_weights: expected "fp32" with weights of {others.pop()}, got "{value}". Only '
            "a bf16 weight is the upper half of its fp32 master; set bf16.enabled."
        )


def check_accumulation(optimizer: torch.optim.Optimizer, settings: ZeroSettings) -> None:
    """Refuse gradients in 16 bits where they cannot be read.

    Raises:
        ValueError: another optimizer than our Adam is to step from them.
    """
    dtype = settings.accumulation.dtype if settings.offload else None
    if dtype is not None and dtype.itemsize == 2 and not isinstance(optimizer, DeepSpeedCPUAdam):
        raise ValueError(
            f"data_types.grad_accum_dtype: expected fp32 or null with {type(optimizer).__name__} on the "
            f"host, got {dtype}. Use Adam or AdamW of the configuration."
        )


def _common_dtype(params: Sequence[torch.nn.Parameter]) -> torch.dtype:
    """The parameters' dtype, or fp32 when they differ."""
    dtypes = {param.dtype for param in params}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _host_settings(
    optimizer: torch.optim.Optimizer, settings: ZeroSettings, wire_dtype: torch.dtype, ledger: Ledger
) -> HostSettings:
    """Leave cores to who works beside the kernels: backward, and the thread that launches or makes copies."""
    grad_threads = step_threads = host_threads()
    if settings.device.type == "cuda":
        grad_threads = threads_beside_backward()
        step_threads = grad_threads if settings.copies_pageable else threads_beside_launches()
    grad_dtype = host_grad_dtype(settings, wire_dtype, isinstance(optimizer, DeepSpeedCPUAdam))
    widens = settings.accumulation.dtype is None
    return HostSettings(grad_dtype, grad_threads, step_threads, ledger, widens, settings.forms)
