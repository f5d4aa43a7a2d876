"""Host memory of a training job as the machine sees it.

RSS alone hides what forked children make the parent copy, and counts shared pages once in every process. The
proportional set size (PSS) of the process and all its descendants adds up to what the machine has lost.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from deepspeed.utils.logging import log_dist

__all__ = ["MemoryReport", "memory_report", "see_memory_usage"]

_GIB = 2**30


@dataclass(frozen=True)
class MemoryReport:
    """Bytes held now, except the two peaks, which cover the life of the process.

    rss_nbytes, peak_rss_nbytes: this process. tree_pss_nbytes: this process and every descendant, shared
    pages divided among those that share them. machine_used_nbytes, machine_total_nbytes: the whole machine.
    device_nbytes,
    peak_device_nbytes: tensors on the current CUDA device, 0 without one.
    """

    rss_nbytes: int
    peak_rss_nbytes: int
    tree_pss_nbytes: int
    machine_used_nbytes: int
    machine_total_nbytes: int
    device_nbytes: int
    peak_device_nbytes: int

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
    return MemoryReport(
        rss_nbytes=rss_nbytes,
        peak_rss_nbytes=_peak_rss_nbytes(),
        tree_pss_nbytes=sum(_pss_nbytes(pid) for pid in _tree(os.getpid())),
        machine_used_nbytes=machine.total - machine.available,
        machine_total_nbytes=machine.total,
        device_nbytes=torch.cuda.memory_allocated() if on_device else 0,
        peak_device_nbytes=torch.cuda.max_memory_allocated() if on_device else 0,
    )


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
        return _field_nbytes(Path("/proc/self/status"), "VmHWM:")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _pss_nbytes(pid: int) -> int:
    """Return a process's PSS; its RSS where the kernel does not tell; 0 once it has ended."""
    try:
        return _field_nbytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss:")
    except OSError:
        try:
            return int(psutil.Process(pid).memory_info().rss)
        except psutil.Error:
            return 0


def _field_nbytes(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
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
