"""What the ZeRO optimizer needs to know from the configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed.runtime.zero.forms import StateForms

# Elements of one tile of the step. Fresh weights are sent on from the cache: tiles of 8 or 16 Mi elements, or
# writing past the cache, took a tenth longer on an H200 host (benchmarks/README.md).
TILE_NUMEL = 1 << 22
# Elements of one download through page-locked memory; three slots are 96 MiB in 16 bits. Downloads of a
# quarter of it took a sixth longer there.
DOWNLOAD_NUMEL = 1 << 24


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
