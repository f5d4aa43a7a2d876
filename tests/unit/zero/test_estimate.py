"""The estimator against the engine's own account."""

import pytest
import torch

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


def test_both_choices_are_printed_for_a_model_and_for_a_number(capsys):
    model = torch.nn.Linear(1024, 1024, bias=False)
    estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=2)
    live = capsys.readouterr().out
    estimate_zero2_model_states_mem_needs_all_cold(1024 * 1024, num_gpus_per_node=2)
    assert capsys.readouterr().out == live
    assert live.splitlines()[0] == "1 M parameters, 1 node(s) of 2 GPU(s)"
    assert [line.split("|")[-1].strip() for line in live.splitlines()[1:]] == [
        "offload_optimizer",
        "cpu",
        "none",
    ]
