"""What every benchmark prints: the machine, a table, one JSON line, a bar chart."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Spread(NamedTuple):
    """Repeated measurements of one quantity."""

    best: float
    median: float
    worst: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Returns the spread of some values."""
        return cls(min(values), statistics.median(values), max(values))


def hardware() -> dict[str, Any]:
    """Returns the processor, the cores this process may use, and the memory."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    total_kb = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1])  # type: ignore[index]
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(total_kb / 2**20, 1),
    }


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a Markdown table; see `table`."""
    print(table(header, rows))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table.

    Args:
        header: names of the columns; the first is aligned left, the others right.
        rows: cells.
    """
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def text(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "| " + " | ".join(cells) + " |"

    rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    return "\n".join([text(lines[0]), text(rule), *map(text, lines[1:])])


def print_json(benchmark: str, result: Mapping[str, Any]) -> None:
    """Prints one line that a program can read.

    Args:
        benchmark: its name.
        result: hardware, versions, shapes, figures.
    """
    print(json.dumps({"benchmark": benchmark, **result}))


def draw_bars(
    path: Path, title: str, unit: str, bars: Mapping[str, Spread], roof: float | None = None
) -> None:
    """Draws horizontal bars of the medians, whiskers from best to worst, and the roof as a line.

    Args:
        path: PNG to write.
        title: what was measured, where.
        unit: of the values.
        bars: name -> values.
        roof: value that none can beat, or None.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path}: expected matplotlib, got none. Run pip install matplotlib for the chart.")
        return
    names = list(bars)[::-1]
    figure = Figure(figsize=(9, 0.55 * len(names) + 1.6), layout="constrained")
    axes = figure.subplots()
    medians = [bars[name].median for name in names]
    whiskers = [
        [bars[name].median - bars[name].best for name in names],
        [bars[name].worst - bars[name].median for name in names],
    ]
    axes.barh(names, medians, xerr=whiskers, color="#4878a8", ecolor="#333333", capsize=3)
    for name, median in zip(names, medians, strict=True):
        axes.annotate(f"{median:.3g}", (median, name), (4, 7), textcoords="offset points", fontsize=8)
    if roof is not None:
        axes.axvline(roof, color="#b03030", linestyle="--", label="roof")
        axes.legend(loc="lower right")
    axes.set_xlabel(unit)
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=120)
    print(f"chart: {path}")
