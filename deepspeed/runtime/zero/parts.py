"""What a ZeRO optimizer is composed of, and the one place that decides which parts."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.adam.host_threads import host_threads
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.runtime.zero.buckets import BucketPool, GradReducer, GradSink
from deepspeed.runtime.zero.change_gate import ChangeGate
from deepspeed.runtime.zero.collectives import Comm
from deepspeed.runtime.zero.device_master import DeviceMaster
from deepspeed.runtime.zero.forms import BLOCK_NUMEL, Flat, MasterForm, StateForms
from deepspeed.runtime.zero.host_buffer import HostBuffer, Ledger
from deepspeed.runtime.zero.host_master import HostMaster, HostSettings
from deepspeed.runtime.zero.inner_state import adopt_state
from deepspeed.runtime.zero.layout import BucketItem, GroupLayout, plan_buckets, plan_groups
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.publisher import ParamPublisher, Publisher, params_dtype
from deepspeed.runtime.zero.staging import SLOTS, Downloader, StagingRing, UploadPublisher

# Elements of one tile of the step. Fresh weights are sent on from the cache: tiles of 8 or 16 Mi elements, or
# writing past the cache, took a tenth longer on an H200 host (benchmarks/README.md).
TILE_NUMEL = 1 << 22
# The same where a tile without a GPU goes through buffers of the C heap: larger ones, freed after each step,
# leave holes there that grow to a hundred megabytes a rank.
_BUFFERED_TILE_NUMEL = 1 << 20
# Elements of one download through page-locked memory; three slots are 96 MiB in 16 bits. Downloads of a
# quarter of it took a sixth longer there.
DOWNLOAD_NUMEL = 1 << 24
# A bucket larger than this gains nothing on any link. On the host it would be memory that a user did not
# count on.
_MOST_BUCKET_NUMEL = {"cpu": 1 << 24, "cuda": 1 << 26}


@dataclass(frozen=True)
class Accumulation:
    """How the gradients of one step are added up.

    Args:
        dtype: in which they are kept and added on the host, whatever else; None: fp32, or as they arrived
            while there is one.
        keeps_16bit: without a dtype, a host gradient that arrives once a step stays as it arrived.
        is_separate: micro-batches are never added in `param.grad`.
    """

    dtype: torch.dtype | None = None
    keeps_16bit: bool = False
    is_separate: bool = False


@dataclass(frozen=True)
class ZeroSettings:
    """Everything that the ZeRO optimizer needs to know from the configuration.

    Args:
        stage: 0, 1 or 2.
        device: where the parameters are.
        offload: keep the shard in host memory.
        pin_memory: page-lock the staging ring.
        reduce_bucket_numel: most elements of a gradient bucket.
        allgather_bucket_numel: most elements gathered at once, over all ranks.
        overlap_comm: reduce one bucket while the next fills.
        wire_dtype: element type of gradients on the wire; None: the parameters'.
        accumulation: how gradients are added up.
        forms: what is kept in smaller forms on the host.
        gradient_clipping: largest norm; 0 for none.
        skip_nonfinite: a step with a gradient that is not finite is skipped.
        ignore_unused_parameters: a parameter without gradient counts as zero instead of being an error.
        tile_numel: elements of one tile of the step.
        download_numel: elements of one gradient download through page-locked memory.
    """

    stage: int
    device: torch.device
    offload: bool = False
    pin_memory: bool = False
    reduce_bucket_numel: int = 1 << 26
    allgather_bucket_numel: int = 1 << 26
    overlap_comm: bool = True
    wire_dtype: torch.dtype | None = None
    accumulation: Accumulation = Accumulation()
    forms: StateForms = StateForms()
    gradient_clipping: float = 0.0
    skip_nonfinite: bool = True
    ignore_unused_parameters: bool = True
    tile_numel: int = TILE_NUMEL
    download_numel: int = DOWNLOAD_NUMEL

    @property
    def copies_pageable(self) -> bool:
        """Whether a processor copies what goes between host and device, since the ring is not page-locked."""
        return self.offload and self.device.type == "cuda" and not self.pin_memory

    def reduces_every_pass(self, world: int) -> bool:
        """Whether gradients leave `param.grad` after every backward pass instead of once a step."""
        return self.stage >= 2 or world == 1 or self.accumulation.is_separate


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
    buffered = settings.device.type == "cpu" and (shards > 1 or not settings.forms.are_default)
    most = _BUFFERED_TILE_NUMEL if buffered else settings.tile_numel
    tile_numel = min(settings.tile_numel, most, settings.allgather_bucket_numel // shards)
    tile_numel = max(1, tile_numel)
    forms, on_device = settings.forms, settings.device.type != "cpu"
    if not forms.are_default:
        check_forms(optimizer, params, settings)
        tile_numel = max(tile_numel // BLOCK_NUMEL * BLOCK_NUMEL, BLOCK_NUMEL)
    from_device = ParamPublisher(
        groups, params, comm, tile_numel, whole_chunks=not forms.are_default and not on_device
    )
    publisher: Publisher = from_device
    closers: list[Any] = []
    master: Master
    if settings.offload:
        downloader = None
        if settings.device.type == "cuda":
            dtypes = [params_dtype(layout, params) for layout in groups]
            widest = max((dtype.itemsize for dtype in dtypes), default=2)
            slot_numel = tile_numel if settings.copies_pageable else max(tile_numel, settings.download_numel)
            reads_weights = forms.master is MasterForm.bf16_residual
            slots = SLOTS + int(reads_weights)
            ring = StagingRing(slot_numel * widest, settings.pin_memory, ledger, slots)
            publisher = UploadPublisher(from_device, dtypes, ring, settings.device, reads_weights)
            downloader = Downloader(ring, settings.device)
            closers = [ring]
        host = _host_settings(optimizer, settings, wire_dtype, ledger)
        op = CPUAdamBuilder().load()
        master = HostMaster(groups, shard, params, optimizer, host, op, downloader)
        if downloader is not None:
            weakref.finalize(master, downloader.close)  # an engine may be dropped without destroy()
    else:
        master = DeviceMaster(groups, shard, params, optimizer, settings.device)
    adopt_state(optimizer, groups, shard, params)
    reducer = _build_reducer(groups, params, settings, comm, wire_dtype, ledger, master.load_grads)
    return ZeroParts(params, names, groups, shard, ledger, master, publisher, reducer, wire_dtype, closers)


def _build_reducer(
    groups: Sequence[GroupLayout],
    params: Mapping[int, torch.nn.Parameter],
    settings: ZeroSettings,
    comm: Comm,
    wire_dtype: torch.dtype,
    ledger: Ledger,
    sink: GradSink,
) -> GradReducer:
    most = _MOST_BUCKET_NUMEL.get(settings.device.type, 1 << 26)
    plans = plan_buckets(groups, min(settings.reduce_bucket_numel, most)) if params else []
    largest_numel = max((plan.numel for plan in plans), default=0)
    pool = BucketPool(wire_dtype, settings.device, partial(_host_bucket, largest_numel, wire_dtype, ledger))
    return GradReducer(plans, params, comm, sink, pool, settings.overlap_comm)


def _host_bucket(numel: int, dtype: torch.dtype, ledger: Ledger) -> HostBuffer:
    """A bucket in host memory; pages become resident as buckets use them."""
    return HostBuffer("bucket", numel, dtype, ledger)


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
    if not hasattr(optimizer._op, "encode_moment"):
        raise ValueError(
            f'{section}.{key}: expected "fp32" with DS_CPU_ADAM=torch, got "{value}". Unset DS_CPU_ADAM: '
            "smaller forms are in the compiled op only."
        )
    others = {param.dtype for param in params.values()} - {torch.bfloat16}
    if forms.master is MasterForm.bf16_residual and others:
        raise ValueError(
            f'{section}.master_weights: expected "fp32" with weights of {others.pop()}, got "{value}". Only '
            "a bf16 weight is the upper half of its fp32 master; set bf16.enabled."
        )


def _common_dtype(params: Sequence[torch.nn.Parameter]) -> torch.dtype:
    """The parameters' dtype, or fp32 when they differ."""
    dtypes = {param.dtype for param in params}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _host_settings(
    optimizer: torch.optim.Optimizer, settings: ZeroSettings, wire_dtype: torch.dtype, ledger: Ledger
) -> HostSettings:
    """Leave cores to who works beside the kernels: backward, and the thread that launches or makes copies.

    A kernel whose threads outnumber the free cores waits for the one that has none: 0.33 against 0.21 ns a
    parameter beside pageable copies, 0.23 against 0.20 beside page-locked ones (benchmarks/README.md).
    """
    threads = host_threads()
    grad_threads = step_threads = threads
    if settings.device.type == "cuda":
        grad_threads = max(1, threads - max(1, threads // 8))
        step_threads = grad_threads if settings.copies_pageable else max(1, threads - 1)
    grad_dtype = _grad_dtype(optimizer, settings, wire_dtype)
    widens = settings.accumulation.dtype is None
    return HostSettings(grad_dtype, grad_threads, step_threads, ledger, widens, settings.forms)


def _grad_dtype(
    optimizer: torch.optim.Optimizer, settings: ZeroSettings, wire_dtype: torch.dtype
) -> torch.dtype:
    """How host gradients are kept at first: as they arrive if nothing is lost by it, else fp32."""
    if settings.accumulation.dtype is not None:
        if settings.accumulation.dtype.itemsize == 2 and not isinstance(optimizer, DeepSpeedCPUAdam):
            raise ValueError(
                f"data_types.grad_accum_dtype: expected fp32 or null with {type(optimizer).__name__} on the "
                f"host, got {settings.accumulation.dtype}. Use Adam or AdamW of the configuration."
            )
        return settings.accumulation.dtype
    keeps = (
        settings.accumulation.keeps_16bit
        and isinstance(optimizer, DeepSpeedCPUAdam)
        and wire_dtype.itemsize == 2
    )
    return wire_dtype if keeps else torch.float32
