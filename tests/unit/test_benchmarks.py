"""The engine's benchmarks run, small, and print what a program can read. What they measure is not judged."""

import json
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
