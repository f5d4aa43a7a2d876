"""The optimizer's step on the host: unscale + clip + AdamW + 16-bit weights out, in nanoseconds a parameter.

Contenders, interleaved in one run: ours (one fused pass), the roof (the same loads and stores without the
formula), torch.optim.AdamW(fused=True) with its scale and cast, and with --stock-python INTERPRETER stock's
DeepSpeedCPUAdam with its unscale and cast. Then the same, a quarter as large, with denormal gradients beside
ordinary ones.

    python benchmarks/host_step.py [--stock-python /path/to/python] [--numel 100000000] [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from report import Spread, draw_bars, hardware, print_json, print_table

HERE = Path(__file__).parent
# Loads and stores of one step: master, moments both ways, 16-bit weights out, and the gradient.
NBYTES_BESIDE_GRADIENT = 3 * 4 + 3 * 4 + 2


class Worker:
    """A child process that holds one family's arrays and times steps on demand."""

    def __init__(self, family: str, interpreter: str, numel: int, threads: int, denormal: bool) -> None:
        self.numel = numel
        command = [interpreter, str(HERE / "host_step_worker.py"), family]
        command += ["--numel", str(numel), "--threads", str(threads), *(["--denormal"] if denormal else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        environment.pop("PYTHONPATH", None)
        if family != "stock":
            environment["PYTHONPATH"] = str(HERE.parent)
        self._process = subprocess.Popen(
            command, env=environment, cwd=HERE, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        ready = json.loads(self._answer("ready"))
        self.contenders: list[str] = ready["contenders"]
        self.facts: dict[str, str] = ready["facts"]

    def ns_per_param(self, contender: str) -> float:
        """Returns the time of one step of a contender, run now."""
        assert self._process.stdin is not None
        self._process.stdin.write(contender + "\n")
        self._process.stdin.flush()
        return float(self._answer("seconds")) / self.numel * 1e9

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate("\n")

    def _answer(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # stock also logs to standard output
            if line.startswith(word + " "):
                return line[len(word) + 1 :]
        raise RuntimeError(
            f"{self._process.args!r}: expected an answer, got the end. Its error stands above."
        )


class Turn(NamedTuple):
    """A contender, and the name that the table gives it."""

    label: str
    contender: str
    worker: Worker


# Label -> ns a parameter, one value a round.
Times = dict[str, list[float]]


def measure(turns: list[Turn], rounds: int) -> Times:
    """Returns the times of all contenders, which take turns.

    Args:
        turns: contenders in their order.
        rounds: steps of each.
    """
    times: Times = {turn.label: [] for turn in turns}
    for _ in range(rounds):
        for turn in turns:
            times[turn.label].append(turn.worker.ns_per_param(turn.contender))
    return times


def run(options: argparse.Namespace) -> tuple[Times, Times, dict[str, str]]:
    """Returns times of ordinary steps, times with and without denormal gradients, and versions."""
    families = {"lean": sys.executable, "torch_fused": sys.executable}
    if options.stock_python:
        families["stock"] = options.stock_python
    facts: dict[str, str] = {"python": platform.python_version()}

    def start(family: str, numel: int, denormal: bool) -> Worker:
        worker = Worker(family, families[family], numel, options.threads, denormal)
        facts.update(worker.facts)
        return worker

    workers = [start(family, options.numel, False) for family in families]
    turns = [Turn(name, name, worker) for worker in workers for name in worker.contenders]
    ordinary = measure(turns, options.rounds)
    for worker in workers:
        worker.close()
    denormal: Times = {}
    for family in families:
        pair = [start(family, options.numel // 4, with_denormals) for with_denormals in (False, True)]
        name = pair[0].contenders[0]
        labels = (name, f"{name}, denormal gradient")
        turns = [Turn(label, name, worker) for label, worker in zip(labels, pair, strict=True)]
        denormal.update(measure(turns, options.rounds))
        for worker in pair:
            worker.close()
    return ordinary, denormal, facts


class Quotient(NamedTuple):
    """How much longer one contender takes than another."""

    median: float  # of the quotients of each round, in which both ran one after the other
    of_bests: float

    @classmethod
    def of(cls, a: list[float], b: list[float]) -> Quotient:
        """Returns a / b."""
        each = [x / y for x, y in zip(a, b, strict=True)]
        return cls(round(statistics.median(each), 3), round(min(a) / min(b), 3))


def quotients(ordinary: Times, denormal: Times) -> dict[str, Quotient]:
    """Returns what is promised about these times."""
    ours = ordinary["ours"]
    found = {
        f"ours / {name}": Quotient.of(ours, ordinary[name])
        for name in ("roof", "torch", "stock")
        if name in ordinary
    }
    for name in ("ours", "torch", "stock"):
        if name in denormal:
            with_denormals = denormal[f"{name}, denormal gradient"]
            found[f"{name}, denormal / ordinary gradient"] = Quotient.of(with_denormals, denormal[name])
    return found


def rows(times: Times) -> list[tuple[str, ...]]:
    """Returns table rows; bandwidth counts the traffic of one pass, so that more passes show as less."""
    made: list[tuple[str, ...]] = []
    for name, values in times.items():
        spread = Spread.of(values)
        nbytes = NBYTES_BESIDE_GRADIENT + (2 if "bf16 gradient" in name else 4)
        figures = (f"{spread.median:.3f}", f"{spread.best:.3f}", f"{spread.worst:.3f}")
        made.append((name, *figures, f"{nbytes / spread.median:.1f}"))
    return made


def main() -> None:
    """Measures, prints and draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=100_000_000, help="parameters")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each contender")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--stock-python", help="interpreter that has stock DeepSpeed installed")
    parser.add_argument("--png", type=Path, default=HERE / "host_step.png", help="chart to write")
    options = parser.parse_args()
    ordinary, denormal, versions = run(options)
    machine = hardware()
    header = ("step", "median ns/param", "best", "worst", "GB/s")
    print(f"{options.numel:,} parameters, {options.threads} threads, {machine['cpu']}")
    print_table(header, rows(ordinary))
    print(f"\nDenormal gradients, {options.numel // 4:,} parameters")
    print_table(header, rows(denormal))
    promised = quotients(ordinary, denormal)
    print()
    print_table(
        ("quotient", "median of rounds", "of bests"),
        [(name, f"{q.median:.2f}", f"{q.of_bests:.2f}") for name, q in promised.items()],
    )
    spreads = {name: Spread.of(values) for name, values in ordinary.items()}
    result: dict[str, Any] = {
        "hardware": machine,
        "versions": versions,
        "numel": options.numel,
        "threads": options.threads,
        "rounds": options.rounds,
        "ns_per_param": {name: spread._asdict() for name, spread in spreads.items()},
        "quotients": {name: quotient._asdict() for name, quotient in promised.items()},
    }
    print_json("host_step", result)
    title = f"Host step, {options.numel / 1e6:.0f} M parameters, {options.threads} threads, {machine['cpu']}"
    draw_bars(options.png, title, "ns per parameter", spreads, spreads["roof"].median)


if __name__ == "__main__":
    main()
