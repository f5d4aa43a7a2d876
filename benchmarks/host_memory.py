"""Host memory of a ZeRO-2 + CPU offload job, in bytes a parameter, by phase: ours, and stock when named.

RSS is the process's own. "tree" is the proportional set size of the process and its children, which is what
the machine loses: what forked data-loader workers make the parent copy shows there and nowhere else. "peak
above" is how far RSS rose within a phase above the end of that phase, at most. Several ranks are added up; of
the devices the fullest counts, its growth and, as "device peak", the most that it held in all.

    python benchmarks/host_memory.py [--stock-python PYTHON] [--stock-path FOLDER] [--numel N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import contenders
from contenders import HERE, Contender, Job
from report import Spread, draw_bars, hardware, print_json, print_table

DEFAULT_NUMEL = {"cpu": 50_000_000, "cuda": 1_208_000_000}
SHOWN_PHASES = ("initialize", "backward 1", "step 1")
DEVICE = ("device", "device peak")
# Master 4, moments 8, and the gradient: 2 as it arrives, 4 where micro-batches are added up.
PROMISE = {False: 14, True: 16}


class Setting(NamedTuple):
    """One row of the matrix."""

    gas: int
    pin: int
    workers: int
    form: str = "fp32"  # of the masters, ours alone

    def __str__(self) -> str:
        pinned = "pinned" if self.pin else "not pinned"
        residual = ", residual" if self.form != "fp32" else ""
        return f"accumulation {self.gas}, {pinned}, {self.workers} workers{residual}"


class Result(NamedTuple):
    """What one contender took in one setting."""

    setting: Setting
    name: str
    phases: dict[str, dict[str, float]]

    @property
    def last(self) -> dict[str, float]:
        """The last phase."""
        return list(self.phases.values())[-1]

    @property
    def peak(self) -> float:
        """How far above its end any phase rose."""
        return max(phase["peak"] - phase["rss"] for phase in self.phases.values())


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    contenders.add_arguments(parser)
    parser.add_argument("--numel", type=int, help="parameters; default 50 M on cpu, 1.2 B on cuda")
    parser.add_argument("--hidden", type=int, default=2048, help="width of a block")
    parser.add_argument("--gas", type=int, nargs="+", default=[1, 2], help="accumulation steps")
    parser.add_argument("--pin", type=int, nargs="+", choices=[0, 1], help="default 0 on cpu, 0 1 on cuda")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="forked data-loader workers")
    parser.add_argument("--fork-at", choices=["initialize", "step1"], default="initialize", help="after it")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps")
    parser.add_argument("--png", type=Path, default=HERE / "host_memory.png", help="chart to write")
    options = parser.parse_args()
    options.device = contenders.choose_device(options)
    options.numel = options.numel or DEFAULT_NUMEL[options.device]
    options.pin = options.pin or ([0, 1] if options.device == "cuda" else [0])
    return options


def measure(options: argparse.Namespace, contender: Contender, setting: Setting) -> dict[str, Any]:
    """Returns the answer of one run, alone on the machine."""
    words = {
        "--numel": options.numel,
        "--hidden": options.hidden,
        "--gas": setting.gas,
        "--pin": setting.pin,
        "--workers": setting.workers,
        "--fork-at": options.fork_at,
        "--steps": options.steps,
    }
    arguments = [str(word) for pair in words.items() for word in pair]
    if setting.form != "fp32":
        arguments += ["--offload", json.dumps({"master_weights": setting.form})]
    job = Job(contender, "host_memory_worker.py", arguments, options.device, options.world)
    answers = job.answer()
    job.close()
    phases = [_together(marks) for marks in zip(*[answer["phases"] for answer in answers], strict=True)]
    return {**answers[0], "phases": dict(phases)}


def _together(marks: Sequence[dict[str, Any]]) -> tuple[str, dict[str, float]]:
    """A phase of all ranks: host memory is added up, and the fullest device counts."""
    host = {key: sum(mark[key] for mark in marks) for key in ("rss", "tree", "peak")}
    device = {key: max(mark[key] for mark in marks) for key in DEVICE}
    return marks[0]["phase"], {key: round(value, 2) for key, value in {**host, **device}.items()}


def header(steps: int) -> tuple[str, ...]:
    """Returns the names of the columns."""
    last = f"step {steps}"
    return ("setting", "", *SHOWN_PHASES, last, f"{last}, tree", "peak above", *DEVICE)


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    """Returns table rows."""
    return [
        (
            str(result.setting),
            result.name,
            *(f"{result.phases[phase]['rss']:.1f}" for phase in SHOWN_PHASES),
            *(f"{result.last[key]:.1f}" for key in ("rss", "tree")),
            f"{result.peak:.1f}",
            f"{result.last['device']:.1f}",
            f"{max(phase['device peak'] for phase in result.phases.values()):.2f}",
        )
        for result in results
    ]


def main() -> None:
    """Measures, prints and draws."""
    options = parse_arguments()
    facts: dict[str, Any] = {}
    results: list[Result] = []
    for cell in itertools.product(options.gas, options.pin, options.workers):
        for contender in contenders.choose(options):
            answer = measure(options, contender, Setting(*cell))
            results.append(Result(Setting(*cell), contender.name, answer.pop("phases")))
            facts[contender.name] = answer
    machine = {**hardware(), "device": facts["ours"]["device"]}
    print(f"{facts['ours']['numel']:,} parameters, bf16, {machine['device']}; growth in bytes a parameter")
    print_table(header(options.steps), rows(results))
    print_json(
        "host_memory",
        {
            "date": time.strftime("%Y-%m-%d"),
            "hardware": machine,
            "versions": {"python": platform.python_version(), **facts},
            "shapes": {"numel": facts["ours"]["numel"], "hidden": options.hidden, "dtype": "bf16"},
            "world": options.world,
            "fork_at": options.fork_at,
            "bytes_per_param": [{**r.setting._asdict(), "name": r.name, "phases": r.phases} for r in results],
        },
    )
    bars = {f"{r.setting}: {r.name}": Spread(*[r.last["tree"]] * 3) for r in results}
    promise = PROMISE[max(options.gas) > 1]
    title = f"Host memory, tree after step {options.steps}, {facts['ours']['numel'] / 1e6:.0f} M parameters"
    draw_bars(options.png, f"{title}, {machine['device']}", "bytes a parameter", bars, promise)


if __name__ == "__main__":
    main()
