"""The estimator against the engine's own account."""

import json

import pytest
import torch

from deepspeed.memory import main
from deepspeed.runtime.zero.estimate import Job, estimates
from deepspeed.runtime.zero.stage_1_and_2 import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from tests.small_engine import ds_config, make_engine

NUMEL = 10_000


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("gas", [1, 4])
def test_the_estimate_is_what_the_engine_holds(gas):
    engine = make_engine(ds_config(dtype="bf16", gradient_accumulation_steps=gas), NUMEL)
    held = sum(entry["nbytes"] for entry in engine.memory_report() if entry["name"] != "bucket")
    host, device = estimate_zero2_model_states_mem_needs(NUMEL, gradient_accumulation_steps=gas)
    assert (host, device) == (held, 2 * NUMEL)


def test_nodes_share_the_host_and_gpus_share_the_device():
    assert estimate_zero2_model_states_mem_needs(1000, 8, 2) == (16 * 1000 // 2, 2000)
    assert estimate_zero2_model_states_mem_needs(1000, 4, 2, cpu_offload=False) == (0, 2000 + 16 * 1000 // 8)
    assert estimate_zero2_model_states_mem_needs(1000, additional_buffer_factor=1.5) == (24000, 3000)


def test_all_settings_of_stage_2_are_printed_for_a_model_and_for_a_number(capsys):
    model = torch.nn.Linear(1024, 1024, bias=False)
    estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=2)
    live = capsys.readouterr().out
    estimate_zero2_model_states_mem_needs_all_cold(1024 * 1024, num_gpus_per_node=2)
    assert capsys.readouterr().out == live
    lines = live.splitlines()
    assert lines[0] == "1 M parameters, 1 node(s) of 2 GPU(s), gradient_accumulation_steps 1"
    # None, and 2 masters of 3 moments each; with accumulation 2 kinds of gradients each.
    assert sum(line.startswith("    2  ") for line in lines) == (1 + 6) + (1 + 12)


def bytes_a_param(numel=1_000_000_000, **job):
    """Host bytes a parameter of every offloaded row, without the ring."""
    found = {}
    for row in estimates(Job(numel, **job)):
        if row.offload:
            held = sum(entry.nbytes for entry in row.host if entry.owner != "StagingRing")
            key = (row.stage, row.master_weights, row.optimizer_states, row.grad_accum_dtype)
            found[key] = round(held * row.gpus_per_node * job.get("nodes", 1) / numel, 2)
    return found


def test_the_table_has_the_bytes_that_the_forms_promise():
    once = bytes_a_param(accumulation=1, gpus_per_node=8)
    assert once[2, "fp32", "fp32", "-"] == 14 and once[1, "bf16_residual", "fp32", "-"] == 12.12
    assert once[2, "bf16_residual", "bf16", "-"] == 8.12 and once[2, "bf16_residual", "int8", "-"] == 6.16
    often = bytes_a_param(accumulation=4, gpus_per_node=4, nodes=2)
    assert often[2, "fp32", "fp32", "-"] == 16 and often[2, "fp32", "fp32", "bf16"] == 14
    assert often[1, "bf16_residual", "fp32", "-"] == 14.12


def test_the_command_writes_the_same_figures_as_text_json_and_png(tmp_path, capsys):
    json_path, png_path = tmp_path / "needs.json", tmp_path / "needs.png"
    arguments = ["--params", "80e9", "--gpus-per-node", "8", "--accumulation", "1", "--pin"]
    main([*arguments, "--json", str(json_path), "--png", str(png_path)])
    text = capsys.readouterr().out
    settings = json.loads(json_path.read_text())["settings"]
    assert len(text.splitlines()) == 3 + len(settings) == 3 + 3 + 12
    for line, row in zip(text.splitlines()[3:], settings, strict=True):
        assert f"{row['host_node_nbytes'] / 2**30:.2f}" in line
        assert f"{row['device_rank_nbytes'] / 2**30:.2f}" in line
        assert sum(row["host_buffers"].values()) == row["host_rank_nbytes"]
    assert png_path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        main(["--params", "0.5"])
