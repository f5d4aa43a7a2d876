"""Memory at the phases of a run: what `memory_breakdown` logs, and a picture of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.utils.logging import log_dist
from deepspeed.utils.memory import MemoryReport, memory_report, memory_table

__all__ = ["MemoryPhase", "MemoryTimeline", "draw_timeline", "pyplot_for_files"]

_MIB = 2**20
_COLORS = ("#2f5d8a", "#4c8bbf", "#7fb3d9", "#b5d4ea", "#f2b56b", "#e08e45", "#b07aa1", "#76b7b2")

Buffers = Sequence[Mapping[str, Any]]


class MemoryPhase(NamedTuple):
    """A moment of a run.

    Args:
        name: of the phase that had ended.
        buffers: what the engine owned then, as `engine.memory_report()`.
        measured: what the machine said.
    """

    name: str
    buffers: Buffers
    measured: MemoryReport

    @property
    def owned_nbytes(self) -> int:
        """All buffers on the host."""
        return sum(entry["nbytes"] for entry in self.buffers if entry["device"] == "cpu")


class MemoryTimeline:
    """Measures at the end of each phase, the first time that it ends, and logs the table on rank 0.

    Switched off it costs nothing.

    Args:
        enabled: `memory_breakdown`.
    """

    def __init__(self, enabled: bool) -> None:
        self.phases: list[MemoryPhase] = []
        self.start = memory_report() if enabled else None

    def mark(self, name: str, buffers: Callable[[], Buffers]) -> None:
        """Note that a phase has ended.

        Args:
            name: of the phase; one that was noted before is passed over.
            buffers: `engine.memory_report`.
        """
        if self.start is None or any(phase.name == name for phase in self.phases):
            return
        phase = MemoryPhase(name, buffers(), memory_report())
        self.phases.append(phase)
        table = memory_table(phase.buffers, phase.measured, self.start)
        log_dist(f"memory_breakdown: after {name}\n{table}", ranks=[0])


def draw_timeline(timeline: MemoryTimeline, path: Path) -> None:
    """Draw what the host holds at each phase, buffer by buffer, against RSS and the tree's PSS.

    Args:
        timeline: of one rank, `engine.memory_timeline`.
        path: where the PNG goes.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: nothing was measured.
    """
    if timeline.start is None or not timeline.phases:
        raise ValueError(
            "timeline: expected phases, got none. Set memory_breakdown to true and train a step."
        )
    pyplot = pyplot_for_files()
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    names = [phase.name for phase in timeline.phases]
    before = timeline.start.rss_nbytes
    kinds = dict.fromkeys(_kind(entry) for phase in timeline.phases for entry in phase.buffers)
    parts = {"before the engine": [before] * len(names)}
    for kind in kinds:
        parts[kind] = [_kind_nbytes(phase, kind) for phase in timeline.phases]
    parts["unaccounted for"] = [
        max(0, phase.measured.rss_nbytes - before - phase.owned_nbytes) for phase in timeline.phases
    ]
    colors = ["#8c8c8c", *(_COLORS[index % len(_COLORS)] for index in range(len(kinds))), "#d9d9d9"]
    bottoms = [0.0] * len(names)
    for (part, nbytes), color in zip(parts.items(), colors, strict=True):
        heights = [each / _MIB for each in nbytes]
        axes.bar(names, heights, bottom=bottoms, width=0.6, label=part, color=color)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for label, field, style in (("RSS", "rss_nbytes", "ko"), ("tree, PSS", "tree_pss_nbytes", "rD")):
        axes.plot(
            names, [getattr(phase.measured, field) / _MIB for phase in timeline.phases], style, label=label
        )
    axes.set(ylabel="MiB", title="Host memory of one rank")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", reverse=True, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def pyplot_for_files() -> Any:
    """matplotlib's pyplot, drawing into files.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "matplotlib: expected it for a picture, got no such package. pip install matplotlib."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _kind(entry: Mapping[str, Any]) -> str:
    return str(entry["name"]).split("[")[0]


def _kind_nbytes(phase: MemoryPhase, kind: str) -> int:
    held = (entry for entry in phase.buffers if entry["device"] == "cpu" and _kind(entry) == kind)
    return sum(entry["nbytes"] for entry in held)
