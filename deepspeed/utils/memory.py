"""Host memory of a training job as the machine sees it.

RSS alone hides what forked children make the parent copy, and counts shared pages once in every process. The
proportional set size (PSS) of the process and all its descendants adds up to what the machine has lost.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from deepspeed.utils.logging import log_dist

__all__ = ["MemoryReport", "memory_report", "memory_table", "see_memory_usage"]

_GIB = 2**30
_MIB = 2**20


@dataclass(frozen=True)
class MemoryReport:
    """Bytes held now, except the two peaks, which cover the life of the process.

    rss_nbytes, peak_rss_nbytes: this process. tree_pss_nbytes: this process and every descendant, shared
    pages divided among those that share them. machine_used_nbytes, machine_total_nbytes: the whole machine.
    device_nbytes, peak_device_nbytes: tensors on the current CUDA device, 0 without one. children: how many
    descendants. children_private_nbytes: pages that one of them alone has, its own or old copies of the
    parent's that the parent has written since the fork. children_shared_nbytes: their part of pages that they
    share, most of them the parent's.
    """

    rss_nbytes: int
    peak_rss_nbytes: int
    tree_pss_nbytes: int
    machine_used_nbytes: int
    machine_total_nbytes: int
    device_nbytes: int
    peak_device_nbytes: int
    children: int = 0
    children_private_nbytes: int = 0
    children_shared_nbytes: int = 0

    def __str__(self) -> str:
        """Return the report on one line, in GiB."""
        parts = [
            f"RSS {self.rss_nbytes / _GIB:.2f} GiB (peak {self.peak_rss_nbytes / _GIB:.2f})",
            f"with children {self.tree_pss_nbytes / _GIB:.2f} GiB PSS",
            f"machine {self.machine_used_nbytes / _GIB:.2f} of {self.machine_total_nbytes / _GIB:.2f} GiB",
        ]
        if self.peak_device_nbytes:
            parts.append(
                f"device {self.device_nbytes / _GIB:.2f} GiB (peak {self.peak_device_nbytes / _GIB:.2f})"
            )
        return ", ".join(parts)


def memory_report() -> MemoryReport:
    """Measure now. Takes milliseconds a GiB of mapped memory: the kernel walks page tables for PSS."""
    process = psutil.Process()
    rss_nbytes = process.memory_info().rss
    machine = psutil.virtual_memory()
    on_device = torch.cuda.is_available() and torch.cuda.is_initialized()
    own, *children = [_PssSplit.of(pid) for pid in _tree(os.getpid())]
    return MemoryReport(
        rss_nbytes=rss_nbytes,
        peak_rss_nbytes=_peak_rss_nbytes(),
        tree_pss_nbytes=sum(split.pss_nbytes for split in (own, *children)),
        machine_used_nbytes=machine.total - machine.available,
        machine_total_nbytes=machine.total,
        device_nbytes=torch.cuda.memory_allocated() if on_device else 0,
        peak_device_nbytes=torch.cuda.max_memory_allocated() if on_device else 0,
        children=len(children),
        children_private_nbytes=sum(split.private_nbytes for split in children),
        children_shared_nbytes=sum(split.pss_nbytes - split.private_nbytes for split in children),
    )


def memory_table(
    buffers: Sequence[Mapping[str, Any]],
    measured: MemoryReport | None = None,
    start: MemoryReport | None = None,
) -> str:
    """Set the buffers of an engine against what the machine measures.

    Args:
        buffers: `engine.memory_report()`.
        measured: what the machine says; measured now by default.
        start: the same before the engine was made; what it had then is told apart from the unaccounted rest.

    Returns:
        Lines in MiB: each kind of buffer, their sum, RSS and the PSS of the process tree, and what no buffer
        explains.
    """
    measured = measured or memory_report()
    host = sum(entry["nbytes"] for entry in buffers if entry["device"] == "cpu")
    device = sum(entry["nbytes"] for entry in buffers) - host
    before = start.rss_nbytes if start is not None else 0
    lines = [f"{'MiB':>12}  {'buffers':<34} {'owner':<15} {'where':<7} pinned", *_buffer_lines(buffers)]
    lines += [
        _line(host, "all buffers on the host"),
        _line(before, "resident before the engine was made"),
        _line(measured.rss_nbytes - before - host, "unaccounted for: interpreter, libraries, activations"),
        _line(measured.rss_nbytes, f"RSS, peak {measured.peak_rss_nbytes / _MIB:.1f}"),
    ]
    if measured.children:
        kind = f"{measured.children} children: "
        lines += [
            _line(measured.children_private_nbytes, f"{kind}own pages, and ours as they were at the fork"),
            _line(measured.children_shared_nbytes, f"{kind}their part of pages shared with this process"),
        ]
    lines.append(_line(measured.tree_pss_nbytes, "PSS of the process tree"))
    if measured.peak_device_nbytes:
        lines += [
            _line(device, "all buffers on the device"),
            _line(measured.device_nbytes - device, "on the device beside them: weights, activations"),
            _line(measured.device_nbytes, f"on the device, peak {measured.peak_device_nbytes / _MIB:.1f}"),
        ]
    return "\n".join(lines)


def _buffer_lines(buffers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line for the buffers of one kind, owner, place and pinning."""
    counts: Counter[tuple[str, ...]] = Counter()
    nbytes: Counter[tuple[str, ...]] = Counter()
    for entry in buffers:
        pinned = "yes" if entry["pinned"] else "no"
        kind = (entry["name"].split("[")[0], entry["owner"], entry["device"], pinned)
        counts[kind] += 1
        nbytes[kind] += entry["nbytes"]
    for (name, owner, place, pinned), count in counts.items():
        label = f"{name} x {count}" if count > 1 else name
        yield _line(nbytes[name, owner, place, pinned], f"{label:<34} {owner:<15} {place:<7} {pinned}")


def _line(nbytes: int, words: str) -> str:
    return f"{nbytes / _MIB:>12.1f}  {words}"


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log a memory report on rank 0.

    Args:
        message: What the report is about; starts the line.
        force: False does nothing, as in DeepSpeed, so that calls may stay in hot code.
    """
    if force:
        log_dist(f"{message}: {memory_report()}", ranks=[0])


def _peak_rss_nbytes() -> int:
    """Return VmHWM, or the largest RSS that getrusage knows where there is no /proc."""
    try:
        return _field_nbytes(Path("/proc/self/status").read_text().splitlines(), "VmHWM:")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class _PssSplit:
    """A process's proportional share, and the part of it that nobody shares."""

    pss_nbytes: int
    private_nbytes: int

    @classmethod
    def of(cls, pid: int) -> _PssSplit:
        """Measure a process; its RSS counts where the kernel does not tell, and nothing once it has ended."""
        rollup = Path(f"/proc/{pid}/smaps_rollup")
        try:
            lines = rollup.read_text().splitlines()
            private = _field_nbytes(lines, "Private_Clean:") + _field_nbytes(lines, "Private_Dirty:")
            return cls(_field_nbytes(lines, "Pss:"), private)
        except OSError:
            try:
                rss_nbytes = int(psutil.Process(pid).memory_info().rss)
            except psutil.Error:
                rss_nbytes = 0
            return cls(rss_nbytes, rss_nbytes)


def _field_nbytes(lines: Sequence[str], field: str) -> int:
    for line in lines:
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def _tree(root: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    children = defaultdict(list)
    for pid in psutil.pids():
        try:
            children[psutil.Process(pid).ppid()].append(pid)
        except psutil.Error:
            continue
    todo = [root]
    while todo:
        pid = todo.pop()
        yield pid
        todo += children[pid]
