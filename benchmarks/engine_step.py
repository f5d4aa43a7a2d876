"""Whole step and backward of the engine under ZeRO-2, CPU offload, bf16 and clipping.

Ours, stock DeepSpeed when it is named, with `--patch` stock with stock_patch too, and the roof: the loads and
stores of the step without arithmetic. Each is a process of its own, and they take turns. A time covers one
optimizer step: `backward` and `step` are sums over its micro-batches, `all` has the forward passes too. Of
several ranks the slowest counts, and the roof is one process a rank.

    python benchmarks/engine_step.py [--stock-python PYTHON] [--stock-path FOLDER] [--numel N] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import contenders
from contenders import HERE, Contender, Job
from report import Spread, draw_bars, hardware, print_json, print_table

DEFAULT_NUMEL = {"cpu": 50_000_000, "cuda": 1_208_000_000}
PARTS = ("step", "backward", "all")
# Smaller forms of the state on the host, measured beside the default when `--forms` asks for them.
FORMS = {
    "ours, residual": {"master_weights": "bf16_residual"},
    "ours, bf16 moments": {"optimizer_states": "bf16"},
    "ours, int8 moments": {"optimizer_states": "int8"},
    "ours, residual and int8": {"master_weights": "bf16_residual", "optimizer_states": "int8"},
}


class Setting(NamedTuple):
    """One row of the matrix."""

    gas: int
    pin: int

    def __str__(self) -> str:
        return f"accumulation {self.gas}, {'pinned' if self.pin else 'not pinned'}"


class Result(NamedTuple):
    """Times of one contender in one setting, ns a parameter."""

    setting: Setting
    name: str
    times: dict[str, Spread]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    contenders.add_arguments(parser)
    parser.add_argument("--numel", type=int, help="parameters; default 50 M on cpu, 1.2 B on cuda")
    parser.add_argument("--hidden", type=int, default=2048, help="width of a block")
    parser.add_argument("--gas", type=int, nargs="+", default=[1, 4], help="accumulation steps")
    parser.add_argument("--pin", type=int, nargs="+", choices=[0, 1], help="default 0 on cpu, 0 1 on cuda")
    parser.add_argument("--rounds", type=int, default=9, help="optimizer steps of each contender")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them")
    parser.add_argument("--forms", action="store_true", help="also in each smaller form of the state")
    parser.add_argument("--png", type=Path, default=HERE / "engine_step.png", help="chart to write")
    options = parser.parse_args()
    options.device = contenders.choose_device(options)
    options.numel = options.numel or DEFAULT_NUMEL[options.device]
    options.pin = options.pin or ([0, 1] if options.device == "cuda" else [0])
    return options


def start(
    options: argparse.Namespace,
    contender: Contender,
    setting: Setting,
    roof: bool = False,
    offload: Mapping[str, str] | None = None,
) -> Job:
    """Starts a contender in a setting, with more keys of `offload_optimizer`."""
    words = {
        "--numel": options.numel,
        "--hidden": options.hidden,
        "--gas": setting.gas,
        "--pin": setting.pin,
        "--warm-up": options.warm_up,
        **({"--offload": json.dumps(offload)} if offload else {}),
    }
    arguments = [str(word) for pair in words.items() for word in pair] + ["--roof"] * roof
    return Job(contender, "engine_step_worker.py", arguments, options.device, options.world)


def measure(options: argparse.Namespace, setting: Setting, facts: dict[str, Any]) -> list[Result]:
    """Returns the times of all contenders in one setting, which take turns.

    Args:
        options: the command line.
        setting: what to measure.
        facts: receives versions and shapes by contender.
    """
    chosen = contenders.choose(options)
    jobs = {contender.name: start(options, contender, setting) for contender in chosen}
    for name, offload in FORMS.items() if options.forms else ():
        jobs[name] = start(options, chosen[0], setting, offload=offload)
    jobs["roof"] = start(options, chosen[0], setting, roof=True)
    for name, job in jobs.items():
        facts[name] = job.answer()[0]
    times: dict[str, list[dict[str, float]]] = {name: [] for name in jobs}
    for _ in range(options.rounds):
        for name, job in jobs.items():
            times[name].append(_slowest(job.ask("go")))
    for job in jobs.values():
        job.close()
    numel = facts["ours"]["numel"]
    return [
        Result(
            setting, name, {part: _ns_per_param(rounds, part, numel) for part in PARTS if part in rounds[0]}
        )
        for name, rounds in times.items()
    ]


def _slowest(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {part: max(seconds[part] for seconds in ranks) for part in ranks[0]}


def _ns_per_param(rounds: list[dict[str, float]], part: str, numel: int) -> Spread:
    return Spread.of([seconds[part] / numel * 1e9 for seconds in rounds])


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    """Returns table rows: median, and best to worst."""
    made = []
    for result in results:
        cells = [
            f"{spread.median:.3f} ({spread.best:.3f} to {spread.worst:.3f})" if spread else ""
            for spread in map(result.times.get, PARTS)
        ]
        made.append((str(result.setting), result.name, *cells))
    return made


def ratios(results: list[Result]) -> dict[str, float]:
    """Returns quotients of medians by setting: ours over each other contender, a smaller form over ours."""
    medians = {(r.setting, r.name, part): s.median for r in results for part, s in r.times.items()}
    made = {}
    for (setting, name, part), median in medians.items():
        ours = medians[setting, "ours", part]
        if name in FORMS:
            made[f"{part}, {setting}: {name} / ours"] = round(median / ours, 3)
        elif name != "ours":
            made[f"{part}, {setting}: ours / {name}"] = round(ours / median, 3)
        stock = medians.get((setting, "stock", part))
        if name == "stock, patched" and stock:
            made[f"{part}, {setting}: {name} / stock"] = round(median / stock, 3)
    return made


def main() -> None:
    """Measures, prints and draws."""
    options = parse_arguments()
    facts: dict[str, Any] = {}
    results: list[Result] = []
    for gas in options.gas:
        for pin in options.pin:
            results += measure(options, Setting(gas, pin), facts)
    facts.pop("roof")
    machine = {**hardware(), "device": facts["ours"]["device"]}
    print(
        f"{facts['ours']['numel']:,} parameters, bf16, {options.world} x {machine['device']}, "
        f"{machine['cores']} cores of {machine['cpu']}"
    )
    print_table(("setting", "", *(f"{part}, ns/param" for part in PARTS)), rows(results))
    quotients = ratios(results)
    print()
    print_table(
        ("quotient of medians", "value"), [(name, f"{value:.2f}") for name, value in quotients.items()]
    )
    print_json(
        "engine_step",
        {
            "date": time.strftime("%Y-%m-%d"),
            "hardware": machine,
            "versions": {"python": platform.python_version(), **facts},
            "shapes": {"numel": facts["ours"]["numel"], "hidden": options.hidden, "dtype": "bf16"},
            "world": options.world,
            "rounds": options.rounds,
            "ns_per_param": [
                {**r.setting._asdict(), "name": r.name, **{part: s._asdict() for part, s in r.times.items()}}
                for r in results
            ],
            "ratios": quotients,
        },
    )
    bars = {f"{r.setting}: {r.name}": r.times["step"] for r in results}
    roof = min(r.times["step"].median for r in results if r.name == "roof")
    title = (
        f"engine.step, {facts['ours']['numel'] / 1e6:.0f} M parameters, {machine['device']}, {machine['cpu']}"
    )
    draw_bars(options.png, title, "ns a parameter", bars, roof)


if __name__ == "__main__":
    main()
