"""ZeRO-2 with CPU offload on several ranks of one host: memory, time, scaling, overlap. One command:

    python benchmarks/several_gpus.py --world 8 [--stock-python PYTHON] [--stock-path FOLDER] [--numel N]

Memory of all ranks together for each accumulation and residual masters (as host_memory.py), time of a step
beside stock's on as many ranks (as engine_step.py), the same at fewer ranks against the roof of the host, and
a trace: how much of each transfer hides behind compute, and what the host waits for. Without a GPU there is
no trace. Ranks that outnumber the GPUs share the first, and their times are no measure. That the numbers are
right is what tests/gpu/test_several_gpus.py shows.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path
from typing import Any

import contenders
import engine_step
import host_memory
from contenders import HERE, Job
from report import Spread, draw_bars, hardware, print_json, print_table
from trace_overlap import HostWait, Transfer

SECTIONS = ("memory", "time", "scaling", "trace")
TRACE_STEPS = 2  # before the traced one
MEMORY_STEPS = 3


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    contenders.add_arguments(parser)
    parser.set_defaults(world=2)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="what to measure")
    parser.add_argument("--numel", type=int, help="parameters; default 50 M on cpu, 1.2 B a rank on cuda")
    parser.add_argument("--hidden", type=int, default=2048, help="width of a block")
    parser.add_argument("--gas", type=int, nargs="+", default=[1, 4], help="accumulation steps")
    parser.add_argument("--rounds", type=int, default=7, help="optimizer steps of each contender")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them")
    parser.add_argument("--keep-trace", type=Path, help="file for rank 0's trace")
    parser.add_argument("--png", type=Path, default=HERE / "several_gpus.png", help="chart of the scaling")
    options = parser.parse_args()
    options.device = contenders.choose_device(options)
    # On GPUs each rank's part is as large as the benchmarks of one rank have it: staging and the like are a
    # constant a rank, and would count for more in bytes a parameter.
    parts = options.world if options.device == "cuda" else 1
    options.numel = options.numel or engine_step.DEFAULT_NUMEL[options.device] * parts
    options.pin = int(options.device == "cuda")
    # What the scripts for one rank ask for beside.
    options.forms, options.fork_at, options.steps = False, "initialize", MEMORY_STEPS
    return options


def measure_memory(options: argparse.Namespace, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Prints and returns what all ranks together take from the host, in bytes a parameter."""
    settings = [host_memory.Setting(gas, options.pin, 0) for gas in options.gas]
    settings.append(host_memory.Setting(1, options.pin, 0, "bf16_residual"))
    results = []
    for setting in settings:
        for contender in contenders.choose(options):
            if contender.name == "ours" or setting.form == "fp32":
                answer = host_memory.measure(options, contender, setting)
                results.append(host_memory.Result(setting, contender.name, answer.pop("phases")))
                facts[contender.name] = answer
    print(f"\nHost memory of {options.world} ranks together, growth in bytes a parameter")
    print_table(host_memory.header(options.steps), host_memory.rows(results))
    return [{**r.setting._asdict(), "name": r.name, "phases": r.phases} for r in results]


def measure_time(options: argparse.Namespace, facts: dict[str, Any]) -> list[engine_step.Result]:
    """Prints and returns the times of all contenders in turns, ns a parameter."""
    results = []
    for gas in options.gas:
        results += engine_step.measure(options, engine_step.Setting(gas, options.pin), facts)
    facts.pop("roof")
    print(f"\nTime of a step on {options.world} ranks, ns a parameter: median (best to worst)")
    print_table(("setting", "", *engine_step.PARTS), engine_step.rows(results))
    print_table(
        ("quotient of medians", "value"),
        [(name, f"{value:.2f}") for name, value in engine_step.ratios(results).items()],
    )
    return results


def measure_scaling(options: argparse.Namespace, facts: dict[str, Any]) -> dict[int, dict[str, Spread]]:
    """Prints, draws and returns `engine.step` and the roof at 1, 2, 4 ... ranks, ns a parameter.

    The roof is the step's memory traffic in as many processes at once: ranks share cores and memory channels.
    """
    worlds = sorted({options.world, *(2**power for power in range(options.world.bit_length()))})
    setting = engine_step.Setting(options.gas[0], options.pin)
    alone = {**vars(options), "stock_python": None, "stock_path": None}
    scaling = {}
    for world in worlds:
        results = engine_step.measure(argparse.Namespace(**{**alone, "world": world}), setting, facts)
        scaling[world] = {result.name: result.times["step"] for result in results}
    facts.pop("roof")
    one = scaling[1]["ours"].median
    rows = [
        (str(world), f"{ours.median:.3f}", f"{roof.median:.3f}")
        + (f"{ours.median / roof.median:.2f}", f"{one / ours.median:.2f}")
        for world, (ours, roof) in ((world, (by["ours"], by["roof"])) for world, by in scaling.items())
    ]
    print(f"\nengine.step by ranks, {setting}, ns a parameter")
    print_table(("ranks", "ours", "roof", "ours / roof", "speed-up"), rows)
    bars = {f"{world} ranks: {name}": spread for world, by in scaling.items() for name, spread in by.items()}
    title = f"engine.step, {facts['ours']['numel'] / 1e6:.0f} M parameters, {facts['ours']['device']}"
    draw_bars(options.png, title, "ns a parameter", bars, min(by["roof"].median for by in scaling.values()))
    return scaling


def measure_trace(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints rank 0's trace of one optimizer step, and returns every rank's."""
    words = {
        "--numel": options.numel,
        "--hidden": options.hidden,
        "--gas": max(options.gas),
        "--pin": options.pin,
        "--warm-up": TRACE_STEPS,
        **({"--keep": options.keep_trace.resolve()} if options.keep_trace else {}),
    }
    arguments = [str(word) for pair in words.items() for word in pair]
    job = Job(
        contenders.choose(options)[0], "several_gpus_worker.py", arguments, options.device, options.world
    )
    answers = job.answer()
    job.close()
    found = {kind: Transfer(**transfer) for kind, transfer in answers[0]["transfers"].items()}
    print(f"\nTransfers of one step on rank 0, accumulation {max(options.gas)}: busy, and hidden by compute")
    print_table(
        ("", "count", "busy, ms", "hidden, ms", "hidden, %"),
        [
            (kind, str(one.count), f"{one.busy_us / 1e3:.2f}", f"{one.hidden_us / 1e3:.2f}")
            + (f"{100 * one.hidden_us / one.busy_us:.0f}" if one.busy_us else "",)
            for kind, one in found.items()
        ],
    )
    waits = [HostWait(**wait) for wait in answers[0]["host_waits"]]
    print_table(
        ("the main thread waits in", "during", "count", "ms"),
        [(wait.name, wait.part, str(wait.count), f"{wait.total_us / 1e3:.2f}") for wait in waits],
    )
    return answers


def main() -> None:
    """Measures section by section, prints and draws."""
    options = parse_arguments()
    if shared := contenders.share_gpu(options.device, options.world):
        print(f"{options.world} ranks share a GPU and talk through sockets: times are no measure of several.")
    facts: dict[str, Any] = {}
    result: dict[str, Any] = {}
    if "memory" in options.only:
        result["bytes_per_param"] = measure_memory(options, facts)
    if "time" in options.only:
        results = measure_time(options, facts)
        result["ns_per_param"] = [
            {**r.setting._asdict(), "name": r.name, **{part: s._asdict() for part, s in r.times.items()}}
            for r in results
        ]
        result["ratios"] = engine_step.ratios(results)
    if "scaling" in options.only:
        scaling = measure_scaling(options, facts)
        result["scaling"] = {
            world: {name: spread._asdict() for name, spread in by.items()} for world, by in scaling.items()
        }
    if "trace" in options.only:
        if options.device == "cuda":
            result["trace"] = measure_trace(options)
        else:
            print("\ntrace: skipped, since it is the GPU's; there is none here.")
    machine = {**hardware(), "device": facts["ours"]["device"] if facts else options.device}
    print_json(
        "several_gpus",
        {
            "date": time.strftime("%Y-%m-%d"),
            "hardware": machine,
            "versions": {"python": platform.python_version(), **facts},
            "shapes": {"numel": options.numel, "hidden": options.hidden, "dtype": "bf16"},
            "world": options.world,
            "gpu_shared": shared,
            "rounds": options.rounds,
            **result,
        },
    )


if __name__ == "__main__":
    main()
