"""What smaller moments cost in loss: the demo's model and data, trained in each form from the same seeds.

Forms see the same weights at the start and the same batches in the same order. Each form is a process of its
own. `bf16, nearest` is no form that can be chosen: it is bf16 moments without the noise, for comparison.

    python benchmarks/quality.py [--steps 1000] [--seeds 3] [--beta2 0.999]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from report import hardware, print_json, print_table

HERE = Path(__file__).resolve().parent
FORMS: dict[str, dict[str, str]] = {
    "fp32": {},
    "bf16": {"optimizer_states": "bf16"},
    "int8": {"optimizer_states": "int8"},
    "bf16, nearest": {"optimizer_states": "bf16"},
}
BATCH, EVALUATION_BATCHES = 32, 100
PEAK_LR = 6e-4


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--beta2", type=float, default=0.999, help="the nearer to 1, the harder for bf16")
    parser.add_argument("--png", type=Path, default=HERE / "quality.png", help="chart to write")
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)  # the process of one form
    return parser.parse_args()


def train(options: argparse.Namespace, form: str, seed: int) -> dict[str, Any]:
    """Trains once; returns the loss at each step and, at the end, over fixed batches."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    import torch
    from gpt import GPT, GPTShape, Windows, standard_library_bytes

    import deepspeed

    torch.manual_seed(seed)
    shape, text = GPTShape(), standard_library_bytes()
    model = GPT(shape).bfloat16()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": PEAK_LR, "betas": [0.9, options.beta2], "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_max_lr": PEAK_LR,
                "warmup_num_steps": max(1, options.steps // 20),
                "warmup_type": "linear",
                "total_num_steps": options.steps,
            },
        },
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", **FORMS[form]}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    windows = Windows(text, BATCH, shape.context, seed=1000 + seed)
    losses = []
    for _ in range(options.steps):
        loss = engine(*(part.to(engine.device) for part in windows()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    fixed = Windows(text, BATCH, shape.context, seed=1)
    with torch.no_grad():
        held = [
            engine(*(part.to(engine.device) for part in fixed())).item() for _ in range(EVALUATION_BATCHES)
        ]
    engine.destroy()
    return {"losses": torch.stack(losses).tolist(), "final": statistics.fmean(held)}


def run_form(options: argparse.Namespace) -> None:
    """The process of one form: one line of JSON at the end."""
    if options.form == "bf16, nearest":
        from deepspeed.runtime.zero.host_shard import HostShard

        HostShard._noise_key = lambda self, step: -1  # type: ignore[method-assign]
    results = [train(options, options.form, seed) for seed in range(options.seeds)]
    print("answer " + json.dumps(results), flush=True)


def run_all(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Returns for each form the results of its seeds; all forms train at the same time."""
    processes = {}
    for index, form in enumerate(FORMS):
        threads = max(1, hardware()["cores"] // len(FORMS))
        environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29611 + index))
        environment.update(OMP_NUM_THREADS=str(threads))
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])
        )
        command = [sys.executable, __file__, "--form", form]
        for name in ("steps", "seeds", "beta2"):
            command += [f"--{name}", str(getattr(options, name))]
        processes[form] = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)
    results = {}
    for form, process in processes.items():
        output, _ = process.communicate()
        lines = [line for line in output.splitlines() if line.startswith("answer ")]
        if not lines:
            raise RuntimeError(f"{form}: expected losses, got none. The error stands above.")
        results[form] = json.loads(lines[-1][len("answer ") :])
    return results


def draw(path: Path, results: dict[str, list[dict[str, Any]]], title: str) -> None:
    """Draws each form's loss over that of fp32 in percent, the mean over seeds, smoothed over 50 steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    width = 50
    figure, axes = plt.subplots(figsize=(9, 4.5))
    for form, runs in results.items():
        if form == "fp32":
            continue
        curve = []
        for end in range(width, len(runs[0]["losses"]) + 1):
            pairs = zip(runs, results["fp32"], strict=True)
            shares = [
                statistics.fmean(run["losses"][end - width : end])
                / statistics.fmean(base["losses"][end - width : end])
                for run, base in pairs
            ]
            curve.append(100 * (statistics.fmean(shares) - 1))
        axes.plot(range(width, width + len(curve)), curve, label=f"{form} moments")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(title=title, xlabel="step", ylabel="loss above that of fp32 moments, %")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Trains, prints and draws."""
    options = parse_arguments()
    if options.form:
        run_form(options)
        return
    results = run_all(options)
    base = [run["final"] for run in results["fp32"]]
    rows, figures = [], {}
    for form, runs in results.items():
        finals = [run["final"] for run in runs]
        shares = [100 * (final / own - 1) for final, own in zip(finals, base, strict=True)]
        figures[form] = {"final": finals, "percent_above_fp32": shares}
        cells = [f"{final:.4f} ({share:+.2f} %)" for final, share in zip(finals, shares, strict=True)]
        rows.append((form, *cells, f"{statistics.fmean(shares):+.3f} %"))
    print_table(
        ("moments", *(f"loss, seed {seed}" for seed in range(options.seeds)), "mean above fp32"), rows
    )
    print_json(
        "quality",
        {
            "date": time.strftime("%Y-%m-%d"),
            "hardware": hardware(),
            "versions": {"python": platform.python_version()},
            "steps": options.steps,
            "beta2": options.beta2,
            "batch": BATCH,
            "losses": figures,
        },
    )
    draw(options.png, results, f"Demo's GPT, {options.steps} steps, beta2 {options.beta2}")
    print(f"chart: {options.png}")


if __name__ == "__main__":
    main()
