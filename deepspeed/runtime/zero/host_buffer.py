"""Exact-size named host memory, kept out of forked children, and the ledger that counts it."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import mmap
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

logger = logging.getLogger("DeepSpeed")

# Absent from Python's mmap module before 3.12; the values are Linux's.
_MADV_DONTFORK = getattr(mmap, "MADV_DONTFORK", 10)
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)
_NOTHING = torch.empty(0, dtype=torch.uint8)
# A step walks four buffers of one size in parallel. Mapped one after the other, they would agree in all low
# bits of their addresses where that size is a multiple of a large power of two, and a cache that looks at
# those bits takes one for the other: half the speed on a Zen 4 (benchmarks/README.md). So the remainders of
# large buffers' addresses go through these; a prime number of them, so that no number of parameter groups
# makes them agree.
_REMAINDERS = itertools.cycle(range(0, 31 * 16384, 16384))
_MODULUS = 32 * 16384
_LARGE_NBYTES = 1 << 20


@dataclass(frozen=True)
class LedgerEntry:
    """One buffer that the package owns, or will own.

    Args:
        name: what it holds; in brackets the number of the parameter group or of the slot.
        nbytes: bytes in use.
        pinned: whether it is page-locked.
        owner: the class that holds it.
        device: where it is.
        reserved_nbytes: bytes of address space beyond those in use, for elements that may become wider.
    """

    name: str
    nbytes: int
    pinned: bool = False
    owner: str = ""
    device: str = "cpu"
    reserved_nbytes: int = 0


class Ledger:
    """Every host buffer that an engine owns: name, owner, bytes, page-locked or not.

    A buffer enters when it is made and leaves when its memory is returned. Iterating gives `LedgerEntry`
    tuples in the order of creation.
    """

    def __init__(self) -> None:
        self._buffers: weakref.WeakValueDictionary[int, HostBuffer] = weakref.WeakValueDictionary()

    def add(self, buffer: HostBuffer) -> None:
        """Count a buffer from now until it is released."""
        self._buffers[id(buffer)] = buffer

    def discard(self, buffer: HostBuffer) -> None:
        """Stop counting a buffer."""
        self._buffers.pop(id(buffer), None)

    def __iter__(self) -> Iterator[LedgerEntry]:
        for buffer in list(self._buffers.values()):
            yield LedgerEntry(
                buffer.name,
                buffer.nbytes,
                buffer.pinned,
                buffer.owner,
                reserved_nbytes=buffer.reserved_nbytes,
            )

    @property
    def total_nbytes(self) -> int:
        """Bytes of all buffers together."""
        return sum(entry.nbytes for entry in self)


class HostBuffer:
    """An anonymous private mapping of exactly the bytes asked for (rounded up to pages by the kernel).

    Goal: training state that costs what arithmetic says, also beside forked data-loader workers. A child of
    `fork` shares the parent's pages until the parent writes; then the kernel duplicates each page for the
    child's sake. The mapping is therefore kept out of children (`MADV_DONTFORK`): nothing is shared, nothing
    is duplicated, and a child that touches it ends loudly. Memory goes back to the system at once when the
    last tensor over it is gone, in the process that made it and in no other.

    Memory: `nbytes`, resident from the first write on.

    Args:
        name: what it holds, for the ledger and for errors.
        numel: number of elements.
        dtype: element type.
        ledger: counts the buffer.
        reserve_dtype: a wider type that `retype` may switch to later. Only address space is reserved for it.
        owner: the class that holds it, for the ledger.
    """

    def __init__(
        self,
        name: str,
        numel: int,
        dtype: torch.dtype,
        ledger: Ledger,
        reserve_dtype: torch.dtype | None = None,
        owner: str = "",
    ) -> None:
        self.name = name
        self.owner = owner
        self.numel = numel
        self.dtype = dtype
        self._ledger = ledger
        self._unpin: weakref.finalize | None = None
        itemsize = max(dtype.itemsize, reserve_dtype.itemsize if reserve_dtype else 0)
        self._memory = _map_anonymous(name, numel * itemsize)
        # [numel * itemsize] uint8, host; empty when there is nothing to hold
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8) if self._memory else _NOTHING
        # [numel] of the present dtype; a view that keeps the memory alive
        self.tensor = self._view()
        ledger.add(self)

    @property
    def pinned(self) -> bool:
        """Whether the buffer is page-locked."""
        return self._unpin is not None and self._unpin.alive

    @property
    def nbytes(self) -> int:
        """Bytes in use: `numel` times the present element size."""
        return self.numel * self.dtype.itemsize

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of address space beyond those in use."""
        return self._bytes.numel() - self.nbytes

    def _view(self) -> torch.Tensor:
        return self._bytes[: self.nbytes].view(self.dtype)

    def fill_zero(self) -> HostBuffer:
        """Write zeros: makes every page resident now, by the threads that will use them. Returns itself."""
        self.tensor.zero_()
        return self

    def retype(self, dtype: torch.dtype) -> None:
        """Convert the elements in place to a wider dtype; no copy exists at any time.

        Upper halves first: the target bytes of elements `[h, n)` with `h = ceil(n / 2)` lie behind every
        source byte when the element doubles, so each round reads and writes disjoint memory.
        """
        narrow, numel = self.tensor, self.numel
        if dtype.itemsize != 2 * self.dtype.itemsize or numel * dtype.itemsize > self._bytes.numel():
            raise RuntimeError(
                f"{self.name}: expected a reserved dtype twice as wide as {self.dtype}, got {dtype}."
            )
        wide = self._bytes[: numel * dtype.itemsize].view(dtype)
        while numel > 1:
            half = (numel + 1) // 2
            wide[half:numel].copy_(narrow[half:numel])
            numel = half
        if numel:
            wide[0] = narrow[0].item()
        self.dtype = dtype
        self.tensor = self._view()

    def pin(self) -> bool:
        """Page-lock the buffer for direct transfers; on failure warn once and go on with pageable memory.

        Returns:
            Whether the buffer is page-locked now.
        """
        if self.pinned or self._memory is None or not torch.cuda.is_available():
            return self.pinned
        code = int(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0))
        if code == 0:
            # A finalizer runs before those registered earlier: unlocked first, unmapped after.
            self._unpin = weakref.finalize(self._memory, _unregister, self._bytes.data_ptr(), os.getpid())
            self._unpin.atexit = False
        else:
            logger.warning(
                "zero_optimization.offload_optimizer.pin_memory: page-locking %d bytes for %s failed "
                "(CUDA error %d); going on without. Raise the memlock limit (ulimit -l) or set "
                "pin_memory to false.",
                self._bytes.numel(),
                self.name,
                code,
            )
            _forget_cuda_error()
        return self.pinned

    def release(self) -> None:
        """Give up the memory; it is unmapped when the last tensor over it is gone. May be called twice."""
        if self._unpin is not None:
            self._unpin()
        self._ledger.discard(self)
        self._bytes, self._memory, self.numel = _NOTHING, None, 0
        self.tensor = self._view()


def mapped_tensor(name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a mapping of its own, of any content, for what lives during a part of a step.

    It goes back to the system with its last view. From the C heap, large blocks that come and go leave holes
    between smaller ones, and the process keeps them.

    Args:
        name: what it holds, for errors.
        numel: number of elements.
        dtype: element type.
    """
    memory = _map_anonymous(name, numel * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype)


def tensor_entry(name: str, tensor: torch.Tensor, owner: str) -> LedgerEntry:
    """What the ledger would say of a tensor that torch allocated."""
    pinned = tensor.device.type == "cpu" and tensor.is_pinned()
    return LedgerEntry(name, tensor.nbytes, pinned, owner, str(tensor.device))


def _map_anonymous(name: str, nbytes: int) -> ctypes.Array | None:
    """A fresh anonymous mapping, unmapped when the returned object dies; None for no bytes."""
    if nbytes == 0:
        return None
    libc = _libc()
    is_large = nbytes >= _LARGE_NBYTES
    mapped = nbytes + _MODULUS if is_large else nbytes  # what the data leave of it is never touched
    address = libc.mmap(
        None, mapped, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise MemoryError(
            f"{name}: expected {nbytes} bytes of host memory, got {os.strerror(code)}. "
            "Use more ranks, a smaller model, or a machine with more memory."
        )
    if libc.madvise(address, mapped, _MADV_DONTFORK) != 0:
        logger.warning(
            "%s: cannot be kept out of forked children (%s)", name, os.strerror(ctypes.get_errno())
        )
    # Fewer page faults at the start and fewer TLB misses in every step; a kernel without huge pages refuses,
    # harmlessly.
    libc.madvise(address, mapped, _MADV_HUGEPAGE)
    start = address + (next(_REMAINDERS) - address) % _MODULUS if is_large else address
    memory = (ctypes.c_ubyte * nbytes).from_address(start)
    weakref.finalize(memory, _unmap, address, mapped, os.getpid()).atexit = False
    return memory


def _forget_cuda_error() -> None:
    """Let torch raise here what it would raise at its next kernel: CUDA keeps the error of a failed call."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _unregister(address: int, owner_pid: int) -> None:
    """Unlock a page-locked mapping, in the process that locked it, when no transfer uses it any more."""
    if os.getpid() == owner_pid:
        if torch.cuda.is_initialized():
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(address)


def _unmap(address: int, nbytes: int, owner_pid: int) -> None:
    """Return a mapping to the system. A forked child does not have it, and may have something else there."""
    if os.getpid() == owner_pid:
        _libc().munmap(address, nbytes)


def _libc() -> ctypes.CDLL:
    """The C library of this process with the three calls typed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
