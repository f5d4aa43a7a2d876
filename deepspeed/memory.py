"""`python -m deepspeed.memory --params 80e9 --gpus-per-node 8`: what a job needs, under every setting."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepspeed.runtime.zero.estimate import Estimate, Job, estimate_table, estimates
from deepspeed.runtime.zero.host_buffer import LedgerEntry
from deepspeed.utils.memory_timeline import pyplot_for_files

_GIB = 2**30


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it as JSON and PNG if asked to.

    Args:
        arguments: of the command line; by default the process's own.
    """
    options = _parser().parse_args(arguments)
    job = Job(options.params, options.gpus_per_node, options.nodes, options.accumulation, options.pin)
    rows = list(estimates(job))
    print(job)
    print(estimate_table(rows))
    if options.json:
        found = {"job": asdict(job), "settings": [_as_dict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if options.png:
        draw_estimates(job, rows, options.png)


def draw_estimates(job: Job, rows: Sequence[Estimate], path: Path) -> None:
    """Draw host memory of a node and device memory of a rank, one bar a setting.

    Args:
        job: for the title.
        rows: the estimates.
        path: where the PNG goes.
    """
    pyplot = pyplot_for_files()
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 1.5 + 0.28 * len(rows)), layout="constrained", sharey=True
    )
    names = [_name(row) for row in rows]
    for axes, values, title, color in (
        (left, [row.host_node_nbytes for row in rows], "host memory of a node, GiB", "#2f5d8a"),
        (right, [row.device_nbytes for row in rows], "device memory of a GPU, GiB", "#f2b56b"),
    ):
        bars = axes.barh(range(len(rows)), [nbytes / _GIB for nbytes in values], color=color)
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
        axes.set(title=title, yticks=range(len(rows)), yticklabels=names)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    left.invert_yaxis()
    figure.suptitle(str(job))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deepspeed.memory", description=__doc__)
    parser.add_argument("--params", type=_count, required=True, help="trainable parameters, such as 80e9")
    parser.add_argument("--gpus-per-node", type=_count, default=1)
    parser.add_argument("--nodes", type=_count, default=1)
    parser.add_argument("--accumulation", type=_count, default=2, help="gradient_accumulation_steps")
    parser.add_argument("--pin", action="store_true", help="with pin_memory")
    parser.add_argument("--json", type=Path, help="write the figures there, in bytes, buffer by buffer")
    parser.add_argument("--png", type=Path, help="draw them there; needs matplotlib")
    return parser


def _count(text: str) -> int:
    value = float(text)
    if not (value >= 1 and value == int(value)):
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text}")
    return int(value)


def _name(row: Estimate) -> str:
    if not row.offload:
        return f"stage {row.stage}, no offload"
    grads = "" if row.grad_accum_dtype == "-" else f", grads {row.grad_accum_dtype}"
    return f"stage {row.stage}, {row.master_weights}, {row.optimizer_states}{grads}"


def _as_dict(row: Estimate) -> dict[str, Any]:
    return {
        "stage": row.stage,
        "offload": row.offload,
        "grad_accum_dtype": row.grad_accum_dtype,
        "master_weights": row.master_weights,
        "optimizer_states": row.optimizer_states,
        "host_rank_nbytes": row.host_nbytes,
        "host_node_nbytes": row.host_node_nbytes,
        "device_rank_nbytes": row.device_nbytes,
        "device_node_nbytes": row.device_node_nbytes,
        "host_buffers": _by_name(row.host),
        "device_buffers": _by_name(row.device),
    }


def _by_name(entries: Sequence[LedgerEntry]) -> dict[str, int]:
    nbytes: Counter[str] = Counter()
    for entry in entries:
        nbytes[entry.name.split("[")[0]] += entry.nbytes
    return dict(nbytes)


if __name__ == "__main__":
    main()
