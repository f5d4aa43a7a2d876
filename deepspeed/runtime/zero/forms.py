"""Smaller forms of master weights and moments in host memory.

What a form holds reads and writes as flat fp32, so that checkpoints and parameter access need not know it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import ModuleType

import torch

# Elements that share a scale. Encoding starts and ends at multiples of it, but for the end of the shard.
BLOCK_NUMEL = 256
# Elements that share a word of the bits that say which masters were halfway between two weights.
TIE_BITS = 16


class MasterForm(str, Enum):
    """How master weights are kept: in fp32, or as what rounding to the bf16 weight took away."""

    fp32 = "fp32"
    bf16_residual = "bf16_residual"


class MomentForm(str, Enum):
    """How Adam's moments are kept: in fp32, in bf16 rounded by chance, or in blocks of 8 bits."""

    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"


@dataclass(frozen=True)
class StateForms:
    """What is kept in which form.

    Args:
        master: of the master weights.
        moments: of both moments.
        seed: of the noise that rounds bf16 moments.
    """

    master: MasterForm = MasterForm.fp32
    moments: MomentForm = MomentForm.fp32
    seed: int = 0

    @property
    def are_default(self) -> bool:
        """Whether everything is fp32."""
        return self.master is MasterForm.fp32 and self.moments is MomentForm.fp32


class EncodedFlat(ABC):
    """A flat fp32 tensor `[numel]` on the host that is kept in a smaller form.

    It has of a tensor's surface what those need who copy state from one place to another.
    """

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, numel: int) -> None:
        self._numel = numel

    @property
    def shape(self) -> torch.Size:
        """`[numel]`."""
        return torch.Size([self._numel])

    @property
    def nbytes(self) -> int:
        """Bytes that it would take in fp32."""
        return self._numel * self.element_size()

    def numel(self) -> int:
        """Number of elements."""
        return self._numel

    def element_size(self) -> int:
        """Bytes of an element as it reads."""
        return self.dtype.itemsize

    def read(self, start: int, end: int) -> torch.Tensor:
        """Elements `[start, end)`, a fresh tensor."""
        first, last = self._aligned(start, end)
        return self._decode(first, last)[start - first : end - first]

    def write(self, start: int, values: torch.Tensor) -> None:
        """Overwrite elements from `start` on; the rest of a block that is met in part is read before."""
        end = start + values.numel()
        first, last = self._aligned(start, end)
        if (first, last) == (start, end):
            whole = values.detach().to("cpu", torch.float32).contiguous()
        else:
            whole = self._decode(first, last)
            whole[start - first : end - first].copy_(values)
        self._encode(first, whole)

    def copy_(self, values: torch.Tensor) -> EncodedFlat:
        """Overwrite everything, as a tensor's method."""
        self.write(0, values.reshape(-1))
        return self

    def _aligned(self, start: int, end: int) -> tuple[int, int]:
        """The whole blocks around a run."""
        return start // BLOCK_NUMEL * BLOCK_NUMEL, min(-(-end // BLOCK_NUMEL) * BLOCK_NUMEL, self._numel)

    @abstractmethod
    def _decode(self, start: int, end: int) -> torch.Tensor:
        """Whole blocks as a fresh fp32 tensor."""

    @abstractmethod
    def _encode(self, start: int, values: torch.Tensor) -> None:
        """Overwrite whole blocks."""


# State with one element for each of the shard's: a tensor, or what reads like one.
Flat = torch.Tensor | EncodedFlat


def read_flat(flat: Flat, start: int, end: int) -> torch.Tensor:
    """Elements `[start, end)`; a view if that is possible."""
    return flat.read(start, end) if isinstance(flat, EncodedFlat) else flat[start:end]


def write_flat(flat: Flat, start: int, values: torch.Tensor) -> None:
    """Overwrite elements from `start` on."""
    if isinstance(flat, EncodedFlat):
        flat.write(start, values)
    else:
        flat[start : start + values.numel()].copy_(values)


def as_tensor(flat: Flat) -> torch.Tensor:
    """All elements; the tensor itself if it is one, else a copy in fp32."""
    return flat.read(0, flat.numel()) if isinstance(flat, EncodedFlat) else flat


class QuantizedMoment(EncodedFlat):
    """A moment in blocks of 256 elements: one byte each, and one fp32 scale a block.

    Memory: `1 + 4 / 256` bytes an element. The first moment has sign and magnitude, the second is never
    negative. Codes are the seven decades of the dynamic data type; values at rest survive a change to fp32
    and back, bit for bit.

    Args:
        codes: `[numel]` uint8, host.
        scale: `[ceil(numel / 256)]` fp32, host.
        is_signed: whether elements may be negative.
        op: the compiled host kernels.

    Source: Dettmers and others, 2021, 8-bit Optimizers via Block-wise Quantization, sections 2.1 and 2.2.
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, is_signed: bool, op: ModuleType) -> None:
        super().__init__(codes.numel())
        self.codes = codes
        self.scale = scale
        self._is_signed = is_signed
        self._op = op

    def zero_(self) -> QuantizedMoment:
        """Set every element to zero, as a tensor's method."""
        self.codes.zero_()
        self.scale.zero_()
        return self

    def part(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of elements `[start, end)`; `start` is a multiple of the block."""
        return self.codes[start:end], self.scale[start // BLOCK_NUMEL : -(-end // BLOCK_NUMEL)]

    def _decode(self, start: int, end: int) -> torch.Tensor:
        values = torch.empty(end - start)
        self._op.decode_moment(*self.part(start, end), self._is_signed, values)
        return values

    def _encode(self, start: int, values: torch.Tensor) -> None:
        self._op.encode_moment(values, self._is_signed, *self.part(start, start + values.numel()))
