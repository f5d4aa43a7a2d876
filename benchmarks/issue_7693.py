"""DeepSpeed issue 7693, reproduced: where 16 bytes of host memory a parameter become 28 and more.

One training job (residual linear blocks, ZeRO-2, optimizer on the host, bf16, AdamW, clipping) in every case
of data-loader workers (none, or two that are forked early, between or late: after initialize, after the first
backward, after the first step), gradient accumulation (1, 2) and pin_memory (pageable, pinned), each
in a process of its own. Contenders are Pythons with some `deepspeed`:

    python benchmarks/issue_7693.py --contenders stock=PYTHON patch=PYTHON:stock_patch lean=PYTHON:.

Prints tables and one line of JSON, and writes them and a picture. RSS is the process's own, "tree" the
proportional set size of the process and its children; both are growth since the model stood on its device, in
bytes a parameter.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from contenders import HERE, Contender, Job, choose_device
from issue_7693_picture import PHASES, draw
from report import hardware, print_json, table

DEFAULT_NUMEL = {"cpu": 200_000_000, "cuda": 1_208_000_000}
FORKS = ("none", "early", "between", "late")
PINNED = ("pageable", "pinned")
BASE = "stock"  # the contender whose step time the others' is divided by
LAST = "last step"


class Case(NamedTuple):
    """One row of the matrix."""

    fork: str
    gas: int
    pinned: str

    def __str__(self) -> str:
        return f"{self.fork}-{self.gas}-{self.pinned}"


CASES = [Case(fork, gas, pinned) for pinned, gas, fork in itertools.product(PINNED, (1, 2), FORKS)]


class Result(NamedTuple):
    """What one contender took in one case."""

    case: Case
    name: str
    answer: dict[str, Any]

    @property
    def phases(self) -> dict[str, dict[str, float]]:
        """Figures by phase."""
        return {phase["phase"]: phase for phase in self.answer["phases"]}

    @property
    def ns_per_param(self) -> float:
        """The fastest step."""
        return min(self.answer["step_seconds"]) / self.answer["numel"] * 1e9


def contender(text: str) -> Contender:
    """Returns what NAME=PYTHON[:FOLDER...] stands for; a name with "patch" in it runs with the patch."""
    name, equals, places = text.partition("=")
    interpreter, *folders = places.split(os.pathsep)
    if not equals or not name or not interpreter:
        raise argparse.ArgumentTypeError(f"expected NAME=PYTHON[:FOLDER...], got {text!r}")
    # The workers run in another folder.
    path = os.pathsep.join(str(Path(folder).resolve()) for folder in folders)
    return Contender(name, interpreter, path or None, "patch" in name)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--contenders",
        type=contender,
        nargs="+",
        metavar="NAME=PYTHON[:FOLDER...]",
        default=[Contender("lean", sys.executable, str(HERE.parent))],
        help='an interpreter, and folders for its PYTHONPATH; "patch" in the name switches stock_patch on',
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="PATTERN",
        help="such as 'early-*' or '*-2-pinned'; default all with a GPU, '*-pageable' without. All: "
        + ", ".join(map(str, CASES)),
    )
    parser.add_argument("--numel", type=int, help="parameters; default 200 M on cpu, 1.2 B on cuda")
    parser.add_argument("--hidden", type=int, default=2048, help="width of a block")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument(
        "--png",
        type=Path,
        default=HERE / "issue_7693.png",
        help="picture; .md and .json go beside it",
    )
    options = parser.parse_args()
    options.device = choose_device(options)
    options.numel = options.numel or DEFAULT_NUMEL[options.device]
    patterns = options.cases or (["*"] if options.device == "cuda" else ["*-pageable"])
    options.cases = [case for case in CASES if any(fnmatch.fnmatch(str(case), p) for p in patterns)]
    if not options.cases:
        parser.error(f"--cases: expected a pattern of {', '.join(map(str, CASES))}; got {patterns}")
    return options


def measure(options: argparse.Namespace, contender: Contender, case: Case) -> Result:
    """Returns the answer of one run, alone on the machine."""
    words = {
        "--numel": options.numel,
        "--hidden": options.hidden,
        "--gas": case.gas,
        "--pin": int(case.pinned == "pinned"),
        "--fork": case.fork,
    }
    arguments = [str(word) for pair in words.items() for word in pair]
    start = time.monotonic()
    job = Job(contender, "issue_7693_worker.py", arguments, options.device, world=1)
    (answer,) = job.answer()
    job.close()
    print(f"{case}, {contender.name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return Result(case, contender.name, answer)


def summary(results: list[Result]) -> str:
    """Returns the table of what each case costs in the end."""
    stock = {result.case: result.ns_per_param for result in results if result.name == BASE}
    header = ("case", "", f"{LAST}, RSS", f"{LAST}, tree", "peak RSS", "peak tree", "device peak")
    rows = []
    for result in results:
        phases = result.phases
        here = phases[LAST]
        tree = [phase["tree"] for phase in phases.values()]
        tree += [growth for _, growth in result.answer["timeline"]["tree"]]
        figures = (here["rss"], here["tree"], max(p["peak"] for p in phases.values()), max(tree))
        device = max(phase["device peak"] for phase in phases.values())
        ratio = f"{result.ns_per_param / stock[result.case]:.2f}" if result.case in stock else ""
        cells = [*(f"{figure:.2f}" for figure in (*figures, device)), f"{result.ns_per_param:.3f}", ratio]
        rows.append((str(result.case), result.name, *cells))
    return table((*header, "step, ns", f"of {BASE}'s"), rows)


def by_phase(results: list[Result]) -> str:
    """Returns the table of the tree after each phase, and of RSS where it is another."""
    names = PHASES[1:]
    rows = []
    for result in results:
        cells = [_cell(result.phases[name]) if name in result.phases else "" for name in names]
        rows.append((str(result.case), result.name, *cells))
    return table(("case", "", *names), rows)


def _cell(phase: dict[str, float]) -> str:
    tree, rss = phase["tree"], phase["rss"]
    return f"{tree:.1f}" if abs(tree - rss) < 0.1 else f"{tree:.1f} ({rss:.1f})"


def heading(whole: dict[str, Any]) -> str:
    """Returns what was measured on what, from `report`."""
    machine = whole["hardware"]
    versions = [
        f"{name}: deepspeed {facts['deepspeed']}, torch {facts['torch']}"
        + (f", with {', '.join(facts['patches'])}" if facts["patches"] else "")
        for name, facts in whole["versions"].items()
    ]
    return (
        f"{whole['date']}. {machine['device']}, {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['memory_gib']} GiB; {'; '.join(versions)}. {whole['shapes']['numel']:,} parameters. "
        "Growth in bytes a parameter; the fastest step in ns a parameter."
    )


def report(options: argparse.Namespace, results: list[Result]) -> dict[str, Any]:
    """Returns what a program can read."""
    facts = {
        r.name: {key: r.answer[key] for key in ("deepspeed", "torch", "device", "patches")} for r in results
    }
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": {**hardware(), "device": results[0].answer["device"]},
        "versions": facts,
        "shapes": {"numel": results[0].answer["numel"], "hidden": options.hidden, "dtype": "bf16"},
        "results": [
            {**r.case._asdict(), "name": r.name, "ns_per_param": r.ns_per_param, **r.answer} for r in results
        ],
    }


def tables(results: list[Result], whole: dict[str, Any]) -> str:
    """Returns all that is printed for people, in Markdown."""
    between = "The tree after each phase, and RSS in brackets where it is another:"
    return "\n\n".join([heading(whole), summary(results), between, by_phase(results)])


def main() -> None:
    """Measures, prints, writes and draws. What was measured is written even if the next run is killed."""
    options = parse_arguments()
    # Only a contender that is named so is patched.
    os.environ.pop("DEEPSPEED_LEAN", None)
    results: list[Result] = []
    failures: list[str] = []
    for case, one in itertools.product(options.cases, options.contenders):
        try:
            results.append(measure(options, one, case))
        except RuntimeError as error:
            failures.append(f"{case}, {one.name}: {error}")
            continue
        whole = report(options, results)
        options.png.with_suffix(".md").write_text(tables(results, whole) + "\n")
        options.png.with_suffix(".json").write_text(json.dumps(whole))
    if results:
        print(tables(results, whole))
        draw(options.png, whole)
        short = [{key: row[key] for key in row if key != "timeline"} for row in whole["results"]]
        print_json("issue_7693", {**whole, "results": short})
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
