"""The picture of issue_7693.py. It can be drawn again, elsewhere, from the JSON that was written beside it:

python benchmarks/issue_7693_picture.py issue_7693.json issue_7693.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# The ends of phases that have a place of their own on the axis.
IN_STEP = ("backward", "unscale", "Adam", "step")
PHASES = (
    "start",
    "initialize",
    *(f"{phase} {step}" for step in (1, 2) for phase in IN_STEP),
    "last step",
    "workers ended",
    "destroy",
)
FORKS = {
    "none": "no workers",
    "early": "2 workers forked after initialize",
    "between": "forked after the first backward",
    "late": "forked after the first step",
}
PROMISE = 16.0  # master 4, gradient 4, moments 8
SHOWN_RISE = 1.0  # bytes a parameter
RSS_COLOR, TREE_COLOR, FORK_COLOR = "#4878a8", "#c0504d", "#3c8d40"

Points = list[tuple[float, float]]


def places(phases: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns where on the axis each phase of a run ended, close behind another for those without a place."""
    known = [(i, float(PHASES.index(p["phase"]))) for i, p in enumerate(phases) if p["phase"] in PHASES]
    found: list[float] = []
    for (i, here), (j, there) in zip(known, known[1:], strict=False):
        found += [here + min(1.0, there - here) * k / (j - i) for k in range(j - i)]
    return [*found, known[-1][1]]


def on_axis(result: Mapping[str, Any], key: str) -> Points:
    """Returns a run's timeline of `rss` or `tree` along the phases instead of time."""
    marks = list(zip(places(result["phases"]), result["phases"], strict=True))
    found = [(place, phase[key]) for place, phase in marks]
    for (here, phase), (there, following) in zip(marks, marks[1:], strict=False):
        start, end = phase["noted"], following["ended"]
        inside = [point for point in result["timeline"][key] if start < point[0] < end]
        found += [(here + (there - here) * (t - start) / (end - start), growth) for t, growth in inside]
    return sorted(found)


def rises(result: Mapping[str, Any]) -> Iterator[tuple[float, float, float]]:
    """Yields place, height and rise of the tree in the phases of a step that add much to it."""
    marks = list(zip(places(result["phases"]), result["phases"], strict=True))
    for (start, before), (end, here) in zip(marks, marks[1:], strict=False):
        rise = here["tree"] - before["tree"]
        if rise > SHOWN_RISE and any(phase in here["phase"] for phase in IN_STEP):
            yield (start + end) / 2, (before["tree"] + here["tree"]) / 2, rise


def draw(path: Path, report: Mapping[str, Any]) -> None:
    """Draws a row a contender, a column a case.

    Args:
        path: PNG to write.
        report: what issue_7693.py wrote as JSON.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path}: expected matplotlib, got none. Run pip install matplotlib for the picture.")
        return
    results = report["results"]
    columns = list(dict.fromkeys((r["gas"], r["fork"]) for r in results))
    rows = list(dict.fromkeys((r["pinned"], r["name"]) for r in results))
    size = (1.2 + 2.7 * len(columns), 1.9 + 2.0 * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False)
    for axes, (gas, fork) in zip(grid[0], columns, strict=True):
        axes.set_title(f"accumulation {gas}\n{FORKS[fork]}", fontsize=9)
    for axes, (pinned, name) in zip(grid[:, 0], rows, strict=True):
        label = f"{name}, pinned" if pinned == "pinned" else name
        axes.set_ylabel(label, fontsize=9, weight="bold")
    figure.supylabel("bytes a parameter", fontsize=9)
    for result in results:
        row = rows.index((result["pinned"], result["name"]))
        column = columns.index((result["gas"], result["fork"]))
        _draw_panel(grid[row][column], result)
    for axes in grid.flat:
        _dress(axes)
    numel, machine = report["shapes"]["numel"], report["hardware"]
    figure.suptitle(
        f"Host memory of ZeRO-2 with the optimizer on the host, {numel / 1e6:.0f} M parameters\n"
        f"{machine['device']}, {machine['cores']} cores of {machine['cpu']}",
        fontsize=10,
    )
    shown: dict[str, Any] = {}
    for axes in grid.flat:
        handles, labels = axes.get_legend_handles_labels()
        shown.update(zip(labels, handles, strict=True))
    place = "outside lower center"
    figure.legend(shown.values(), shown, loc=place, ncols=len(shown), fontsize=9, frameon=False)
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


def _draw_panel(axes: Any, result: Mapping[str, Any]) -> None:
    axes.plot(
        *zip(*on_axis(result, "tree"), strict=True), color=TREE_COLOR, linewidth=1.8, label="tree (PSS)"
    )
    axes.plot(*zip(*on_axis(result, "rss"), strict=True), color=RSS_COLOR, linewidth=1.2, label="RSS")
    for place, phase in zip(places(result["phases"]), result["phases"], strict=True):
        if phase["phase"] == "workers":
            axes.axvline(place, color=FORK_COLOR, linewidth=1.2, linestyle=":", label="fork")
    for place, height, rise in rises(result):
        axes.annotate(
            f"+{rise:.1f}", (place, height), (-5, 2), textcoords="offset points", ha="right", **_SMALL
        )
    (last,) = [phase for phase in result["phases"] if phase["phase"] == "last step"]
    spot = (PHASES.index("last step"), last["tree"])
    axes.annotate(f"{last['tree']:.1f}", spot, (0, 3), textcoords="offset points", ha="center", **_SMALL)


_SMALL = {"fontsize": 7.5, "weight": "bold", "color": TREE_COLOR}


def _dress(axes: Any) -> None:
    axes.axhline(PROMISE, color="#333333", linewidth=0.9, linestyle="--", label="16 B", zorder=0)
    for step in (1, 2):
        bounds = PHASES.index(f"backward {step}"), PHASES.index(f"step {step}")
        axes.axvspan(*bounds, color="#f2f0e6", zorder=-2, label="engine.step()" if step == 1 else None)
    axes.set_xticks(range(len(PHASES)), PHASES, rotation=90, fontsize=7.5)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6, zorder=-1)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlim(0, len(PHASES) - 1)
    axes.set_ylim(bottom=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    draw(Path(sys.argv[2]), json.loads(Path(sys.argv[1]).read_text()))
