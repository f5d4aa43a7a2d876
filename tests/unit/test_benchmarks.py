"""The engine's benchmarks run, small, and print what a program can read. What they measure is not judged."""

import json
import os
import subprocess
import sys

import pytest

from tests.unit.source_tree import ROOT

SMALL = ["--device", "cpu", "--numel", "4000000", "--hidden", "512"]


def run(name, folder, *arguments):
    """The result line of a benchmark that was run with these arguments, and its chart."""
    chart = folder / "chart.png"
    command = [sys.executable, str(ROOT / "benchmarks" / name), *SMALL, "--png", str(chart), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1
    assert chart.read_bytes().startswith(b"\x89PNG")
    return lines[0]


def test_host_memory_measures_every_phase(tmp_path):
    result = run("host_memory.py", tmp_path, "--gas", "2", "--workers", "0", "--steps", "2")
    (row,) = result["bytes_per_param"]
    assert list(row["phases"]) == ["initialize", "backward 1", "step 1", "step 2"]
    # So small a model shows the process's own memory beside its 16 bytes: a byte a parameter is 4 MB here.
    assert all(phase["rss"] > 14 and phase["tree"] > 14 for phase in row["phases"].values())


def test_engine_step_times_ours_and_the_roof_part_by_part(tmp_path):
    result = run("engine_step.py", tmp_path, "--gas", "2", "--rounds", "2", "--warm-up", "1")
    parts = {row["name"]: set(row) - {"gas", "pin", "name"} for row in result["ns_per_param"]}
    assert parts == {"ours": {"step", "backward", "all"}, "roof": {"step"}}
    assert result["shapes"]["numel"] == pytest.approx(4_000_000, rel=0.1)
    assert all(row["step"]["best"] > 0 for row in result["ns_per_param"])


def test_several_ranks_are_measured_together_and_without_a_gpu_the_trace_is_skipped(tmp_path):
    arguments = ["--world", "2", "--gas", "1", "--rounds", "2", "--warm-up", "1"]
    result = run("several_gpus.py", tmp_path, *arguments, "--only", "memory", "scaling", "trace")
    assert [row["form"] for row in result["bytes_per_param"]] == ["fp32", "bf16_residual"]
    assert all(row["phases"]["step 3"]["tree"] > 12 for row in result["bytes_per_param"])
    assert {world: set(row) for world, row in result["scaling"].items()} == dict.fromkeys(
        ("1", "2"), {"ours", "roof"}
    )
    assert "trace" not in result


def test_a_rank_traces_its_step():
    """Without a GPU there are no transfers to find; what makes and reads the trace runs all the same."""
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    words = {"--device": "cpu", "--numel": 500_000, "--hidden": 256, "--gas": 2, "--pin": 0, "--warm-up": 1}
    command = [sys.executable, str(ROOT / "benchmarks" / "several_gpus_worker.py")]
    command += [str(word) for pair in words.items() for word in pair]
    options = {"capture_output": True, "text": True, "timeout": 170, "stdin": subprocess.DEVNULL}
    result = subprocess.run(command, env={**os.environ, **place}, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    (answer,) = [line for line in result.stdout.splitlines() if line.startswith("answer ")]
    found = json.loads(answer.removeprefix("answer "))
    assert found["host_waits"] == [] and found["transfers"]["upload"]["count"] == 0


def test_issue_7693_shows_phases_a_timeline_and_what_a_fork_costs(tmp_path):
    result = run("issue_7693.py", tmp_path, "--cases", "early-2-pageable")
    (row,) = result["results"]
    phases = [phase["phase"] for phase in row["phases"]]
    steps = [f"{phase} {step}" for step in (1, 2) for phase in ("first backward", "backward", "step")]
    assert phases == ["start", "initialize", "workers", *steps, "last step", "workers ended", "destroy"]
    # With the engine go the masters and moments at least.
    trees = {phase["phase"]: phase["tree"] for phase in row["phases"]}
    assert trees["workers ended"] > 14 and trees["destroy"] < trees["workers ended"] - 12
    timeline = json.loads((tmp_path / "chart.json").read_text())["results"][0]["timeline"]
    first, last = row["phases"][0]["ended"], row["phases"][-1]["noted"]
    for points in timeline.values():
        times = [at for at, _ in points]
        assert first - 1 < times[0] and times == sorted(times) and times[-1] < last
        assert max(growth for _, growth in points) > 14
    assert "| early-2-pageable | lean |" in (tmp_path / "chart.md").read_text()
