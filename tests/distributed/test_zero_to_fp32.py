"""The fp32 weights come out of the optimizer files exactly, whatever ranks and optimizer wrote them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils import zero_to_fp32 as tool
from tests.compat.peer_job import Model
from tests.distributed.checkpoint_cases import JOBS, trained
from tests.distributed.harness import run_distributed
from tests.small_engine import Weights, ds_config

KINDS = ["stage 2 offload bf16", "stage 1 offload fp16", "stage 1 device bf16", "SGD with momentum", "Lion"]


def _expected(engine):
    """What the conversion must give: masters of trainable parameters, the rest as it is."""
    masters = {
        name: safe_get_full_fp32_param(param)
        for name, param in engine.module.named_parameters()
        if param.requires_grad
    }
    masters["head.weight"] = masters["embed.weight"]
    return {name: masters.get(name, value).clone() for name, value in engine.module.state_dict().items()}


def _save_kinds(folder):
    rank = dist.get_rank()
    expected = {}
    for kind in KINDS:
        engine = trained(JOBS[kind], 2, rank)
        engine.save_checkpoint(Path(folder, kind))
        expected[kind] = _expected(engine)
    return expected


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of two ranks and their fp32 weights."""
    folder = tmp_path_factory.mktemp("kinds")
    return folder, run_distributed(2, _save_kinds, str(folder))[0]


def _same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value) and actual[name].dtype == value.dtype, name


@pytest.mark.parametrize("kind", KINDS)
def test_every_stage_and_optimizer_converts_exactly(kind, saved):
    folder, expected = saved
    weights = tool.get_fp32_state_dict_from_zero_checkpoint(folder / kind)
    _same(weights, expected[kind])
    assert weights["embed.weight"].data_ptr() == weights["head.weight"].data_ptr(), "tied weights stay tied"
    lazy = tool.get_fp32_state_dict_from_zero_checkpoint(folder / kind, tag="global_step2", lazy_mode=True)
    assert lazy["embed.weight"].shape == (5, 3) and not isinstance(lazy["embed.weight"], torch.Tensor)
    _same({name: value.contiguous() for name, value in lazy.items()}, expected[kind])
    _same(tool.to_torch_tensor(lazy), expected[kind])


def test_frozen_parameters_can_be_left_out(saved):
    folder, expected = saved
    weights = tool.get_fp32_state_dict_from_zero_checkpoint(folder / KINDS[0], exclude_frozen_parameters=True)
    assert expected[KINDS[0]].keys() - weights.keys() == {"frozen.weight", "frozen.bias"}


def _many_small(folder):
    """4 and 8 parameters of one element in two groups: shards end inside a group and hold padding."""
    model = Weights(*[1] * 12)
    for index, part in enumerate(model.parts):
        part.data.fill_(float(index + 1))
    parts = list(model.parts)
    groups = [{"params": parts[:4]}, {"params": parts[4:]}]
    engine = deepspeed.initialize(model=model, model_parameters=groups, config=ds_config())[0]
    engine.save_checkpoint(folder)


@pytest.mark.parametrize("world", [2, 3])
def test_many_one_element_parameters_in_two_groups_come_out_in_their_places(world, tmp_path):
    run_distributed(world, _many_small, str(tmp_path))
    weights = tool.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert {name: value.tolist() for name, value in weights.items()} == {
        f"parts.{index}": [index + 1.0] for index in range(12)
    }


@pytest.mark.parametrize("safe", [False, True])
def test_files_are_laid_out_as_hugging_face_does(safe, saved, tmp_path):
    folder, expected = saved
    expected = dict(expected[KINDS[0]])
    if safe:
        del expected["head.weight"]  # a second name: safetensors holds each tensor once

    def read(path):
        if safe:
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, weights_only=True)

    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tool.convert_zero_checkpoint_to_fp32_state_dict(folder / KINDS[0], whole, safe_serialization=safe)
    assert [path.name for path in whole.iterdir()] == [f"{stem}.{suffix}"]
    _same(read(whole / f"{stem}.{suffix}"), expected)

    tool.convert_zero_checkpoint_to_fp32_state_dict(
        folder / KINDS[0], parts, max_shard_size="100B", safe_serialization=safe
    )
    index = json.loads((parts / f"{stem}.{suffix}.index.json").read_text())
    files = sorted(path.name for path in parts.iterdir() if path.suffix != ".json")
    assert files == [f"{stem}-{i + 1:05d}-of-{len(files):05d}.{suffix}" for i in range(len(files))]
    assert len(files) > 2 and index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    merged = {}
    for file in files:
        part = read(parts / file)
        assert len(part) == 1 or sum(value.nbytes for value in part.values()) <= 100
        assert all(index["weight_map"][name] == file for name in part)
        merged |= part
    _same(merged, expected)


def test_a_tied_name_left_out_of_safetensors_stands_in_the_metadata(saved, tmp_path):
    from safetensors import safe_open

    folder, _ = saved
    tool.convert_zero_checkpoint_to_fp32_state_dict(folder / KINDS[0], tmp_path, safe_serialization=True)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def test_another_dtype_is_made_from_the_masters(saved, tmp_path):
    folder, expected = saved
    tool.convert_zero_checkpoint_to_state_dict(folder / KINDS[0], tmp_path, dtype=torch.float16)
    weights = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    _same(weights, {k: v.half() if v.is_floating_point() else v for k, v in expected[KINDS[0]].items()})


def test_the_script_in_the_checkpoint_folder_converts(saved, tmp_path):
    folder, expected = saved
    script = folder / KINDS[0] / "zero_to_fp32.py"
    command = [sys.executable, str(script), ".", str(tmp_path / "out"), "--tag", "global_step2"]
    root = str(Path(__file__).parents[2])
    run = subprocess.run(
        command, cwd=script.parent, env={"PYTHONPATH": root, "PATH": ""}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    _same(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True), expected[KINDS[0]])


def test_weights_load_into_a_plain_model(saved):
    folder, expected = saved
    model = Model()
    assert tool.load_state_dict_from_zero_checkpoint(model, folder / KINDS[0]) is model
    _same(
        {k: v.float() for k, v in model.state_dict().items()},
        {k: v.float() for k, v in expected[KINDS[0]].items()},
    )


def test_files_are_found_as_clients_ask_for_them(saved):
    folder, _ = saved
    tag = folder / KINDS[0] / "global_step2"
    optims = tool.get_optim_files(tag)
    assert [Path(path).name for path in optims] == [
        f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)
    ]
    assert torch.load(optims[0], weights_only=True)["optimizer_state_dict"]["zero_stage"] == 2
    assert tool.get_model_state_file(tag, 2) == str(tag / "mp_rank_00_model_states.pt")
    with pytest.raises(NotImplementedError, match="zero_stage"):
        tool.get_model_state_file(tag, 3)
    with pytest.raises(FileNotFoundError, match="optim_states"):
        tool.get_optim_files(folder)
    with pytest.raises(ValueError, match="latest"):
        tool.get_fp32_state_dict_from_zero_checkpoint(folder)
    with pytest.raises(ValueError, match="max_shard_size"):
        tool.convert_zero_checkpoint_to_fp32_state_dict(folder / KINDS[0], folder, max_shard_size="many")
