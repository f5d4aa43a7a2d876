"""What a job costs in host memory: measured from outside, beside what its buffers add up to.

All figures are sums over the ranks, so they do not depend on how the work is split.
"""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist

# Adam in fp32: master weight 4, gradient 4, two moments of 4.
PROMISED_NBYTES = 16
COLORS = ("#2f5d8a", "#4c8bbf", "#7fb3d9", "#b5d4ea", "#f2b56b")


class BufferRow(NamedTuple):
    """Equally named and equally pinned host buffers of all ranks."""

    name: str
    count: int
    nbytes: int
    pinned: bool


class Phase(NamedTuple):
    """A moment of the run: what had been taken from the machine by then, and what the engine says it owns."""

    name: str
    growth_nbytes: int  # resident set minus the baseline
    buffers: tuple[BufferRow, ...]

    @property
    def owned_nbytes(self) -> int:
        """All buffers together."""
        return sum(row.nbytes for row in self.buffers)


@dataclass
class MemoryAccount:
    """Measures the growth of the resident set since it was made, phase by phase.

    Args:
        param_numel: parameters of the whole model.
    """

    param_numel: int
    phases: list[Phase] = field(default_factory=list)
    baseline_nbytes: int = field(default_factory=lambda: resident_nbytes())

    def growth_nbytes(self) -> int:
        """Growth of this rank alone, now."""
        return resident_nbytes() - self.baseline_nbytes

    def mark(self, name: str, report: Sequence[dict[str, Any]]) -> None:
        """Note a phase. Every rank must call it.

        Args:
            name: of the phase.
            report: this rank's `engine.memory_report()`.
        """
        gc.collect()
        entries: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(entries, (self.growth_nbytes(), list(report)))
        buffers = [
            buffer for _, rank_report in entries for buffer in rank_report if buffer["device"] == "cpu"
        ]
        self.phases.append(Phase(name, sum(growth for growth, _ in entries), _add_up(buffers)))

    def per_param(self, nbytes: float) -> float:
        """Bytes a parameter."""
        return nbytes / self.param_numel


def resident_nbytes() -> int:
    """Resident set of this process, after the C heap has returned what it merely keeps for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(psutil.Process().memory_info().rss)


def memory_table(account: MemoryAccount) -> str:
    """The closing table: every buffer, their sum, what was measured, and the difference."""
    last = account.phases[-1]
    unaccounted = last.growth_nbytes - last.owned_nbytes

    def line(name: str, nbytes: int, note: str = "") -> str:
        return f"  {name:<28}{nbytes:>14,}{account.per_param(nbytes):>10.2f}   {note}".rstrip()

    lines = [f"  {'host buffers of all ranks':<28}{'bytes':>14}{'a param':>10}   pinned"]
    for row in last.buffers:
        lines.append(line(f"{row.count} x {row.name}", row.nbytes, "yes" if row.pinned else "no"))
    lines += [
        "  " + "-" * (len(lines[0]) - 2),
        line("sum", last.owned_nbytes),
        line("measured growth (RSS)", last.growth_nbytes),
        line("unaccounted for", unaccounted, f"{unaccounted / dist.get_world_size() / 1e6:.1f} MB a process"),
    ]
    return "\n".join(lines)


def draw_phases(account: MemoryAccount, path: Path) -> None:
    """Draw measured memory by phase, and what it consists of, against the promise.

    Args:
        account: the measured phases.
        path: where the PNG goes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    names = [phase.name for phase in account.phases]
    bottoms = [0.0] * len(names)
    parts = _parts(account)
    for (part, heights), color in zip(parts.items(), [*COLORS[: len(parts) - 1], "#c9c9c9"], strict=False):
        axes.bar(names, heights, bottom=bottoms, width=0.6, label=part, color=color)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for index, phase in enumerate(account.phases):
        measured = account.per_param(phase.growth_nbytes)
        axes.annotate(f"{measured:.2f}", (index, bottoms[index]), ha="center", va="bottom", fontweight="bold")
    axes.axhline(PROMISED_NBYTES, color="#d62728", linestyle="--", label="16 bytes")
    axes.set(ylabel="host bytes a parameter", title="Measured host memory (growth of RSS, all ranks)")
    axes.set_yticks(range(0, PROMISED_NBYTES + 1, 4))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", reverse=True, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _add_up(report: Sequence[dict[str, Any]]) -> tuple[BufferRow, ...]:
    """Equal buffers of several ranks as one row each, in the order of first appearance."""
    counts: Counter[tuple[str, bool]] = Counter()
    nbytes: Counter[tuple[str, bool]] = Counter()
    for buffer in report:
        counts[buffer["name"], buffer["pinned"]] += 1
        nbytes[buffer["name"], buffer["pinned"]] += buffer["nbytes"]
    return tuple(
        BufferRow(name, count, nbytes[name, pinned], pinned) for (name, pinned), count in counts.items()
    )


def _parts(account: MemoryAccount) -> dict[str, list[float]]:
    """Bytes a parameter by kind of buffer and phase; last, what no buffer explains."""
    kinds = dict.fromkeys(row.name.split("[")[0] for phase in account.phases for row in phase.buffers)
    parts = {
        kind: [
            account.per_param(sum(row.nbytes for row in phase.buffers if row.name.split("[")[0] == kind))
            for phase in account.phases
        ]
        for kind in kinds
    }
    parts["unaccounted for"] = [
        account.per_param(max(0, phase.growth_nbytes - phase.owned_nbytes)) for phase in account.phases
    ]
    return parts
