"""How many bytes an engine holds, buffer by buffer: known before anything is allocated.

What allocates, what checks before it and what estimates without a model all count with the functions here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepspeed.runtime.zero.forms import BLOCK_NUMEL, TIE_BITS, MasterForm, MomentForm
from deepspeed.runtime.zero.host_buffer import LedgerEntry
from deepspeed.runtime.zero.publisher import OPEN_CHUNKS
from deepspeed.runtime.zero.settings import ZeroSettings
from deepspeed.runtime.zero.staging import SLOTS

ADAM_STATE = ("exp_avg", "exp_avg_sq")
# A bucket larger than this gains nothing on any link. On the host it would be memory that a user did not
# count on.
_MOST_BUCKET_NUMEL = {"cpu": 1 << 24, "cuda": 1 << 26}
# Elements of a tile that goes through buffers of its own, without a GPU.
_BUFFERED_TILE_NUMEL = 1 << 20
# State of one element each that optimizers keep in fp32, by lower-case end of the class's name.
_STATE_NAMES = (
    ("lion", ("exp_avg",)),
    ("cpuadagrad", ("exp_avg_sq",)),
    ("adagrad", ("sum",)),
    ("rmsprop", ("square_avg",)),
    ("adadelta", ("square_avg", "acc_delta")),
    ("adamax", ("exp_avg", "exp_inf")),
)


@dataclass(frozen=True)
class Facts:
    """What memory depends on beside the settings.

    Args:
        shard_numels: elements of this rank's shard of each parameter group, without padding.
        full_numel: elements of all trainable parameters.
        world: data-parallel ranks.
        weight_dtype: the widest of the parameters.
        wire_dtype: element type of gradients on the wire.
        bucket_numel: elements of the largest gradient bucket.
        bucket_count: how many buckets the gradients are cut into.
        state_names: what the inner optimizer keeps for each element.
        is_fused: the inner optimizer is our Adam.
    """

    shard_numels: Sequence[int]
    full_numel: int
    world: int
    weight_dtype: torch.dtype
    wire_dtype: torch.dtype
    bucket_numel: int
    bucket_count: int
    state_names: Sequence[str] = ADAM_STATE
    is_fused: bool = True

    @classmethod
    def of_numel(
        cls, numel: int, world: int, settings: ZeroSettings, dtype: torch.dtype = torch.bfloat16
    ) -> Facts:
        """What is likely for a model of which only the number of parameters is known.

        Args:
            numel: trainable parameters, in one group, none larger than a bucket.
            world: data-parallel ranks.
            settings: of the engine.
            dtype: of the weights.
        """
        shard = -(-numel // world) if settings.stage > 0 else numel
        most = bucket_numel_limit(settings)
        wire = settings.wire_dtype or dtype
        return cls((shard,), numel, world, dtype, wire, min(numel, most), -(-numel // most))


class Needs(NamedTuple):
    """Buffers of one rank."""

    held: list[LedgerEntry]  # from initialization on; buckets on the host from the first backward pass on
    passing: list[LedgerEntry]  # at most, during a backward pass or a step

    def nbytes(self, on_host: bool) -> int:
        """Bytes of all buffers on the host, or of all on the device."""
        return sum(entry.nbytes for entry in self.on(on_host))

    def address_nbytes(self) -> int:
        """Address space of all buffers on the host."""
        return sum(entry.nbytes + entry.reserved_nbytes for entry in self.on(True))

    def on(self, on_host: bool) -> list[LedgerEntry]:
        """The buffers on the host, or those on the device."""
        return [entry for entry in self.held + self.passing if (entry.device == "cpu") is on_host]


def memory_needs(settings: ZeroSettings, facts: Facts) -> Needs:
    """Count every buffer that an engine will own on one rank.

    The model's own weights, activations, and gradients on their way from autograd to a bucket are not among
    them.
    """
    held = list(_host_state(settings, facts) if settings.offload else _device_state(settings, facts))
    bucket_nbytes = facts.bucket_numel * facts.wire_dtype.itemsize
    buckets = min(facts.bucket_count, 1 + overlap_depth(settings, facts.world))
    device = str(settings.device)
    in_flight = [LedgerEntry("bucket", bucket_nbytes, owner="BucketPool", device=device)] * buckets
    passing = list(_passing(settings, facts))
    if settings.device.type == "cpu":
        return Needs(held + in_flight, passing)
    return Needs(held, in_flight + passing)


def bucket_numel_limit(settings: ZeroSettings) -> int:
    """Most elements of a bucket with more than one parameter."""
    return min(settings.reduce_bucket_numel, _MOST_BUCKET_NUMEL.get(settings.device.type, 1 << 26))


def overlap_depth(settings: ZeroSettings, world: int) -> int:
    """Buckets whose reduction may be in flight while the next one fills."""
    return 1 if settings.overlap_comm and world > 1 else 0


def tile_numel(settings: ZeroSettings, shards: int) -> int:
    """Elements of one tile of the step."""
    buffered = settings.device.type == "cpu" and (shards > 1 or not settings.forms.are_default)
    most = _BUFFERED_TILE_NUMEL if buffered else settings.tile_numel
    numel = max(1, min(settings.tile_numel, most, settings.allgather_bucket_numel // shards))
    if settings.forms.are_default:
        return numel
    return max(numel // BLOCK_NUMEL * BLOCK_NUMEL, BLOCK_NUMEL)


def ring_shape(settings: ZeroSettings, shards: int, weight_dtype: torch.dtype) -> tuple[int, int]:
    """Slots of the staging ring, and bytes of one; none without a device to stage for."""
    if not settings.offload or settings.device.type != "cuda":
        return 0, 0
    tile = tile_numel(settings, shards)
    slot_numel = tile if settings.copies_pageable else max(tile, settings.download_numel)
    reads_weights = settings.forms.master is MasterForm.bf16_residual
    return SLOTS + int(reads_weights), slot_numel * weight_dtype.itemsize


def host_grad_dtype(settings: ZeroSettings, wire_dtype: torch.dtype, is_fused: bool) -> torch.dtype:
    """How host gradients are kept at first: as they arrive if nothing is lost by it, else fp32."""
    if settings.accumulation.dtype is not None:
        return settings.accumulation.dtype
    keeps = settings.accumulation.keeps_16bit and is_fused and wire_dtype.itemsize == 2
    return wire_dtype if keeps else torch.float32


def state_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """What an optimizer keeps for each element; of an unknown one, what Adam does."""
    name = type(optimizer).__name__.lower()
    if name.endswith("sgd"):
        momentum = any(group.get("momentum") for group in optimizer.param_groups)
        return ("momentum_buffer",) if momentum else ()
    return next((names for end, names in _STATE_NAMES if name.endswith(end)), ADAM_STATE)


def _host_state(settings: ZeroSettings, facts: Facts) -> Iterator[LedgerEntry]:
    """Ring, masters, gradients and moments in host memory."""
    slots, slot_nbytes = ring_shape(settings, _shards(settings, facts), facts.weight_dtype)
    for slot in range(slots):
        yield LedgerEntry(f"staging[{slot}]", slot_nbytes, settings.pin_memory, "StagingRing")
    grad_dtype = host_grad_dtype(settings, facts.wire_dtype, facts.is_fused)
    for index, numel in enumerate(facts.shard_numels):
        for name, nbytes in _master_parts(settings, numel):
            yield LedgerEntry(f"{name}[{index}]", nbytes, owner="HostShard")
        for name, nbytes in _moment_parts(settings, facts, numel):
            owner = "HostShard" if facts.is_fused else "optimizer"
            yield LedgerEntry(f"{name}[{index}]", nbytes, owner=owner)
        nbytes = numel * grad_dtype.itemsize
        reserved = numel * torch.float32.itemsize - nbytes
        yield LedgerEntry(f"gradient[{index}]", nbytes, owner="HostMaster", reserved_nbytes=reserved)


def _master_parts(settings: ZeroSettings, numel: int) -> Iterator[tuple[str, int]]:
    if settings.forms.master is MasterForm.fp32:
        yield "master", 4 * numel
    else:
        yield "residual", 2 * numel
        yield "ties", 2 * -(-numel // TIE_BITS)


def _moment_parts(settings: ZeroSettings, facts: Facts, numel: int) -> Iterator[tuple[str, int]]:
    form = settings.forms.moments if facts.is_fused else MomentForm.fp32
    for name in facts.state_names:
        yield name, {MomentForm.fp32: 4, MomentForm.bf16: 2, MomentForm.int8: 1}[form] * numel
        if form is MomentForm.int8:
            yield f"{name}_scale", 4 * -(-numel // BLOCK_NUMEL)


def _device_state(settings: ZeroSettings, facts: Facts) -> Iterator[LedgerEntry]:
    """Masters, gradients and state beside the parameters, all in fp32."""
    for index, numel in enumerate(facts.shard_numels):
        for name in ("master", "gradient", *facts.state_names):
            owner = "optimizer" if name in facts.state_names else "DeviceMaster"
            yield LedgerEntry(f"{name}[{index}]", 4 * numel, owner=owner, device=str(settings.device))


def _passing(settings: ZeroSettings, facts: Facts) -> Iterator[LedgerEntry]:
    """What lives for a part of a step only."""
    device, shards = str(settings.device), _shards(settings, facts)
    on_host = settings.device.type == "cpu"
    if not settings.reduces_every_pass(facts.world) and not settings.accumulation.keeps_16bit:
        nbytes = facts.full_numel * facts.weight_dtype.itemsize
        yield LedgerEntry("param.grad", nbytes, owner="model", device=device)
    chunk_numel = min(tile_numel(settings, shards), max(facts.shard_numels, default=0))
    chunks = 2 * (shards + 1) if shards > 1 else 0
    if shards == 1 and on_host and not settings.forms.are_default:
        chunks = OPEN_CHUNKS
    if chunks:
        nbytes = chunks * chunk_numel * facts.weight_dtype.itemsize
        yield LedgerEntry("chunks", nbytes, owner="ParamPublisher", device=device)
    if on_host and facts.world > 1:
        in_flight_numel = (1 + overlap_depth(settings, facts.world)) * facts.bucket_numel
        # Every rank sends what this one owns of the buckets, which may be all of them.
        own_numel = -(-in_flight_numel // facts.world)
        if shards > 1:
            own_numel = min(in_flight_numel, sum(facts.shard_numels))
        nbytes = facts.world * own_numel * facts.wire_dtype.itemsize
        yield LedgerEntry("rows", nbytes, owner="collectives")


def _shards(settings: ZeroSettings, facts: Facts) -> int:
    return facts.world if settings.stage > 0 else 1
