"""`memory_breakdown`: a table at each phase, once, that adds up; and its picture."""

import pytest
import torch

from deepspeed.utils.memory import MemoryReport, memory_table
from deepspeed.utils.memory_timeline import MemoryTimeline, draw_timeline
from tests.small_engine import captured_log, ds_config, make_engine, run_micro_batch

MIB = 2**20


@pytest.mark.usefixtures("world_of_one")
def test_phases_are_logged_once_each_and_drawn(tmp_path):
    with captured_log() as log:
        engine = make_engine(ds_config(dtype="bf16", memory_breakdown=True), MIB)
        for _ in range(3):
            run_micro_batch(engine, torch.ones(MIB))
    tables = [line.split("memory_breakdown: after ")[1] for line in log if "memory_breakdown" in line]
    phases = ["initialize", "first backward", "first step"]
    assert [table.splitlines()[0] for table in tables] == phases
    assert not any("has no effect" in line for line in log)
    assert "bucket" not in tables[0] and "bucket" in tables[1]
    lines = [line.split() for line in tables[2].splitlines()]
    assert ["4.0", "master", "HostShard", "cpu", "no"] in lines
    assert ["2.0", "gradient", "HostMaster", "cpu", "no"] in lines
    assert engine.memory_timeline.phases[2].owned_nbytes == sum(e["nbytes"] for e in engine.memory_report())
    draw_timeline(engine.memory_timeline, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("world_of_one")
def test_switched_off_nothing_is_measured(tmp_path):
    engine = make_engine(ds_config(), 16)
    run_micro_batch(engine, torch.ones(16))
    assert engine.memory_timeline.phases == [] and engine.memory_timeline.start is None
    with pytest.raises(ValueError, match="memory_breakdown"):
        draw_timeline(MemoryTimeline(False), tmp_path / "none.png")


def test_the_table_adds_up_and_names_what_children_hold():
    start = MemoryReport(100 * MIB, 100 * MIB, 100 * MIB, 0, 0, 0, 0)
    now = MemoryReport(170 * MIB, 180 * MIB, 190 * MIB, 0, 0, 50 * MIB, 60 * MIB, 2, 30 * MIB, 5 * MIB)
    master = {"owner": "HostShard", "device": "cpu", "nbytes": 30 * MIB, "pinned": True}
    bucket = {"owner": "BucketPool", "device": "cuda:0", "nbytes": 8 * MIB, "pinned": False}
    buffers = [{"name": "master[0]", **master}, {"name": "master[1]", **master}, {"name": "bucket", **bucket}]
    lines = [line.split() for line in memory_table(buffers, now, start).splitlines()]
    found = {" ".join(words[1:]): float(words[0]) for words in lines[1:]}
    assert found["master x 2 HostShard cpu yes"] == 60 == found["all buffers on the host"]
    assert found["bucket BucketPool cuda:0 no"] == 8 == found["all buffers on the device"]
    rest = {words: value for words, value in found.items() if words.startswith("unaccounted for")}
    assert list(rest.values()) == [170 - 100 - 60]
    assert found["RSS, peak 180.0"] == 170 and found["PSS of the process tree"] == 190
    assert [value for words, value in found.items() if words.startswith("2 children")] == [30, 5]
    assert found["on the device beside them: weights, activations"] == 42
