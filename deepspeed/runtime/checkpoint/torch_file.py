"""Writes torch's zip file format piece by piece, from memory where it lies.

`torch.save` copies a device tensor whole to the host and cannot pad. Here a file is planned first: every
record has its place before a byte is written. Tensors then go out in pieces, in any order between records, so
that neither a copy nor a buffer is needed, and `torch.load` cannot tell the difference.

Source: the zip records that torch.save writes (torch 2.13), and APPNOTE 6.3 of the zip format.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from deepspeed.runtime.checkpoint.names import CheckpointError
from deepspeed.runtime.zero.forms import EncodedFlat, Flat

# Bytes of a tensor that are in flight at once; what a device tensor needs on the host while it is written.
PIECE_NBYTES = 1 << 24
# torch aligns tensors to this many bytes, so that a mapped file can be used in place.
_ALIGNMENT_NBYTES = 64
_ARCHIVE = "archive"
_LIMIT_32BIT = 0xFFFFFFFF
_STORAGE_TYPES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}


@dataclass(frozen=True)
class TensorSource:
    """A tensor to write, taken from memory as it is when its turn comes.

    Args:
        tensor: `[...]`, host or device, contiguous; or what reads like one.
        padded_numel: write it as a flat tensor of this many elements, zeros behind its own; None: as it is.
    """

    tensor: Flat
    padded_numel: int | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape in the file."""
        return self.tensor.shape if self.padded_numel is None else torch.Size([self.padded_numel])

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.shape.numel() * self.tensor.element_size()

    def read(self, start: int, end: int) -> memoryview:
        """Bytes `[start, end)` of the record; a view of the tensor's memory when it is on the host."""
        own = self.tensor.numel() * self.tensor.element_size()
        if start >= own:
            return memoryview(bytes(end - start))
        end = min(end, own)
        if isinstance(self.tensor, EncodedFlat):
            itemsize = self.tensor.element_size()
            piece = self.tensor.read(start // itemsize, end // itemsize).view(torch.uint8)
        else:
            piece = _flat_bytes(self.tensor)[start:end].cpu()
        return memoryview(cast(Any, piece.numpy()))


class Record:
    """One record of the file: its place, and the checksum of what has been written so far."""

    def __init__(self, name: str, source: TensorSource | bytes) -> None:
        self.name = f"{_ARCHIVE}/{name}".encode()
        self.source = source
        self.nbytes = len(source) if isinstance(source, bytes) else source.nbytes
        self.header_start = 0  # of the local header in the file
        self.crc = 0
        self.written = 0  # bytes so far

    @property
    def large(self) -> bool:
        """Whether the record needs the 64-bit form."""
        return self.nbytes >= _LIMIT_32BIT

    def header(self, start: int) -> bytes:
        """The local header for a record that starts at `start`; the data behind it is aligned."""
        sizes = (_LIMIT_32BIT,) * 2 if self.large else (self.nbytes, self.nbytes)
        extra = struct.pack("<HHQQ", 1, 16, self.nbytes, self.nbytes) if self.large else b""
        filled = start + 30 + len(self.name) + len(extra) + 4
        padding = -filled % _ALIGNMENT_NBYTES
        extra += struct.pack("<2sH", b"FB", padding) + bytes(padding)
        head = struct.pack(
            "<4s5H3I2H", b"PK\3\4", self._version, 0, 0, 0, 0, self.crc, *sizes, len(self.name), len(extra)
        )
        return head + self.name + extra

    def directory_entry(self) -> bytes:
        """The record's entry of the central directory."""
        far = self.header_start >= _LIMIT_32BIT
        wide = ([self.nbytes] * 2 if self.large else []) + ([self.header_start] if far else [])
        extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        sizes = (_LIMIT_32BIT,) * 2 if self.large else (self.nbytes, self.nbytes)
        start = _LIMIT_32BIT if far else self.header_start
        version = 45 if wide else 20
        head = struct.pack(
            "<4s6H3I5H2I",
            *(b"PK\1\2", version, version, 0, 0, 0, 0, self.crc, *sizes),
            *(len(self.name), len(extra), 0, 0, 0, 0, start),
        )
        return head + self.name + extra

    @property
    def _version(self) -> int:
        return 45 if self.large else 20


@dataclass
class TorchFile:
    """A planned file: write every record's pieces, in order within the record, then `finish`.

    Args:
        records: in file order, each with its place.
        tensors: those that hold a tensor's data, in the order in which they were met.
    """

    records: list[Record]
    tensors: list[Record]

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(record.nbytes for record in self.tensors)

    def write(self, fd: int, record: Record, end: int | None = None) -> Iterator[int]:
        """Write a record from where it stands, piece by piece.

        Args:
            fd: file open for writing.
            record: of this file.
            end: byte of the record to stop before; None: to its end.

        Returns:
            The bytes of each piece, once it has been written.
        """
        end = record.nbytes if end is None else end
        base = record.header_start + len(record.header(record.header_start))
        while record.written < end:
            start = record.written
            if isinstance(record.source, bytes):
                piece = memoryview(record.source)
            else:
                piece = record.source.read(start, min(start + PIECE_NBYTES, end))
            _pwrite(fd, piece, base + start)
            record.crc = zlib.crc32(piece, record.crc)
            record.written += len(piece)
            yield len(piece)

    def finish(self, fd: int) -> None:
        """Write what is left, the headers, now that checksums are known, and the directory; flush it all to
        the disk."""
        for record in self.records:
            for _ in self.write(fd, record):
                pass
            _pwrite(fd, memoryview(record.header(record.header_start)), record.header_start)
        last = self.records[-1]
        start = last.header_start + len(last.header(last.header_start)) + last.nbytes
        directory = b"".join(record.directory_entry() for record in self.records)
        _pwrite(
            fd, memoryview(directory + _end_of_directory(len(self.records), start, len(directory))), start
        )
        os.fsync(fd)


def write_torch_file(path: Path, content: Any, advance: Callable[[int], None] | None = None) -> None:
    """Write and flush a file; nothing is left if that fails.

    Args:
        path: the file.
        content: see `plan_torch_file`.
        advance: is told of bytes written.

    Raises:
        CheckpointError: the disk is full, or the like.
    """
    write_planned(path, plan_torch_file(content), advance)


def write_planned(
    path: Path,
    plan: TorchFile,
    advance: Callable[[int], None] | None = None,
    order: Callable[[TorchFile, int], Iterator[int]] | None = None,
) -> None:
    """The same for a file that has been planned.

    Args:
        path: the file.
        plan: its plan; used up.
        advance: is told of bytes written.
        order: writes the tensors' records in an order of its own; by default one after the other.
    """
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        for nbytes in (order or _one_by_one)(plan, fd):
            if advance is not None:
                advance(nbytes)
        plan.finish(fd)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{path}: cannot be written: {error.strerror}.") from error
        raise
    finally:
        os.close(fd)


def _one_by_one(plan: TorchFile, fd: int) -> Iterator[int]:
    for record in plan.tensors:
        yield from plan.write(fd, record)


def plan_torch_file(content: Any) -> TorchFile:
    """Lay a file out.

    Args:
        content: nested containers of plain values, tensors and `TensorSource` leaves. Their memory is read
        when the
            file is written, not here.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(content)
    tensors = [Record(f"data/{index}", source) for index, source in enumerate(pickler.sources)]
    records = [
        Record("data.pkl", buffer.getvalue()),
        Record("byteorder", b"little"),
        *tensors,
        Record("version", b"3\n"),
        Record(".data/serialization_id", str(uuid.uuid4().int).zfill(40)[:40].encode()),
    ]
    start = 0
    for record in records:
        record.header_start = start
        start += len(record.header(start)) + record.nbytes
    return TorchFile(records, tensors)


class _StorageRef:
    """Stands for a tensor's storage inside the pickle."""

    def __init__(self, source: TensorSource, key: int) -> None:
        # Types that are younger than typed storages come as bytes, and their tensors name the type
        # themselves.
        kind = _STORAGE_TYPES.get(source.tensor.dtype, torch.UntypedStorage)
        numel = source.nbytes if kind is torch.UntypedStorage else source.shape.numel()
        self.persistent_id = ("storage", kind, str(key), "cpu", numel)


class _Pickler(pickle.Pickler):
    """Pickles containers, and collects the tensors in them instead of their bytes.

    Two tensors over the same memory with the same extent and type share a record, as tied weights do.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.sources: list[TensorSource] = []
        self._keys: dict[tuple[Any, ...], int] = {}

    def persistent_id(self, obj: Any) -> Any:
        """What torch's unpickler resolves itself: storages."""
        return obj.persistent_id if isinstance(obj, _StorageRef) else None

    def reducer_override(self, obj: Any) -> Any:
        """How tensors are rebuilt. Layouts and classes beyond the plain ones are left to their own way."""
        if isinstance(obj, TensorSource):
            return self._reduce(obj)
        if type(obj) in (torch.Tensor, torch.nn.Parameter) and _is_plain(obj):
            return self._reduce(TensorSource(obj.detach().contiguous()))
        return NotImplemented

    def _reduce(self, source: TensorSource) -> Any:
        shape = tuple(source.shape)
        stride = torch.empty(shape, device="meta").stride()
        arguments: tuple[Any, ...] = (self._storage_ref(source), 0, shape, stride, False, OrderedDict())
        if source.tensor.dtype in _STORAGE_TYPES:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, source.tensor.dtype)

    def _storage_ref(self, source: TensorSource) -> _StorageRef:
        tensor = source.tensor
        key: tuple[Any, ...] = (object(),)
        if isinstance(tensor, EncodedFlat):
            key = (tensor,)
        elif tensor.numel():
            key = (tensor.data_ptr(), tensor.device, tensor.dtype, source.nbytes)
        index = self._keys.setdefault(key, len(self.sources))
        if index == len(self.sources):
            self.sources.append(source)
        return _StorageRef(source, index)


def _is_plain(tensor: torch.Tensor) -> bool:
    bits_as_they_are = not tensor.is_conj() and not tensor.is_neg() and not tensor.is_quantized
    return tensor.layout is torch.strided and bits_as_they_are and tensor.device.type != "meta"


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory, `[nbytes]` uint8, without copying."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _pwrite(fd: int, piece: memoryview, start: int) -> None:
    """Write all of a piece; one call may take less than is given."""
    done = 0
    while done < len(piece):
        done += os.pwrite(fd, piece[done:], start + done)


def _end_of_directory(count: int, start: int, nbytes: int) -> bytes:
    """What closes a zip file; with the 64-bit form in front where a 32-bit field would not hold."""
    tail = b""
    if count > 0xFFFF or start >= _LIMIT_32BIT or nbytes >= _LIMIT_32BIT:
        tail = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, nbytes, start)
        tail += struct.pack("<4sIQI", b"PK\6\7", 0, start + nbytes, 1)
    small = min(count, 0xFFFF)
    return tail + struct.pack(
        "<4s4H2IH", b"PK\5\6", 0, 0, small, small, min(nbytes, _LIMIT_32BIT), min(start, _LIMIT_32BIT), 0
    )
