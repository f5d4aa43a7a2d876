"""What of a checkpoint is saved and loaded, as its callers ask for it."""

import argparse
import inspect
import stat
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed.runtime.checkpoint.names import CheckpointError
from deepspeed.utils import safe_get_full_fp32_param
from tests.compat.peer_job import train
from tests.distributed.checkpoint_cases import JOBS, another_engine, assert_same, snapshot, trained
from tests.distributed.harness import run_distributed
from tests.small_engine import captured_log

JOB = JOBS["stage 2 offload bf16"]
# Key order of stock's files; micro_steps is ours.
MODEL_KEYS = [
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "micro_steps",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
]
OPTIM_KEYS = [
    "loss_scaler_state",
    "dynamic_loss_scale",
    "overflow",
    "clip_grad",
    "base_optimizer_state",
    "single_partition_of_fp32_groups",
    "zero_stage",
    "group_paddings",
    "param_alignment_paddings",
    "partition_count",
    "ds_version",
    "param_slice_mappings",
]


def _plain(value):
    if isinstance(value, dict):
        return type(value) in (dict, OrderedDict) and all(map(_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple, torch.Size) and all(map(_plain, value))
    return value is None or type(value) in (bool, int, float, str, torch.Tensor)


def _all_files(folder):
    rank = dist.get_rank()
    for index, job in enumerate(JOBS.values()):
        path = Path(folder, str(index))
        trained(job, 1, rank).save_checkpoint(
            path, client_state={"epoch": 3, "nested": {"list": [1, (2.0, "x")]}}
        )
        files = sorted(file.name for file in (path / "global_step1").iterdir())
        prefix = "bf16_" if job.dtype == "bf16" else ""
        optims = [f"{prefix}zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1)]
        assert files == sorted(["mp_rank_00_model_states.pt", *(optims if job.stage else [])])
        assert (path / "latest").read_text() == "global_step1"
        for file in files:
            content = torch.load(path / "global_step1" / file, weights_only=True)
            assert _plain(content)
            if "model_states" in file:
                assert list(content) == [*MODEL_KEYS, "epoch", "nested"]
            else:
                assert list(content) == ["optimizer_state_dict", "ds_config", "ds_version"]
                assert list(content["optimizer_state_dict"]) == OPTIM_KEYS
                assert content["optimizer_state_dict"]["zero_stage"] == job.stage
        script = path / "zero_to_fp32.py"
        assert script.exists() == (job.stage > 0)
        if job.stage:
            assert stat.S_IMODE(script.stat().st_mode) == 0o744


def test_every_file_loads_with_weights_only_and_has_stocks_names_and_keys(tmp_path):
    run_distributed(2, _all_files, str(tmp_path))


def _parts(folder):
    rank = dist.get_rank()
    engine = trained(JOB, 3, rank)
    engine.save_checkpoint(folder)
    saved = snapshot(engine)
    weights = list(engine.module.state_dict())

    def loaded(**arguments):
        other = another_engine(JOB)
        path, client_state = other.load_checkpoint(folder, **arguments)
        assert path is not None and client_state["ds_version"] == "0.19.8"
        for name in weights:
            assert torch.equal(other.module.state_dict()[name], saved[name])
        return other, snapshot(other)

    for arguments, counters, scheduled in (
        ({"load_module_only": True}, 0, False),
        ({"load_optimizer_states": False}, 3, True),
        ({"load_optimizer_states": False, "load_lr_scheduler_states": False}, 3, False),
    ):
        other, state = loaded(**arguments)
        assert state["counters"][0] == counters
        assert (state["schedule"] == saved["schedule"]) == scheduled
        for name, param in other.module.named_parameters():
            if param.requires_grad:
                master = safe_get_full_fp32_param(param)
                assert torch.equal(master, param.float()), f"{name}: masters follow the weights"
                assert not torch.equal(master, saved[f"{name}.master"]) or name == "unused"
        train(other, 1, rank)

    _, state = loaded(load_lr_scheduler_states=False)
    assert state.pop("schedule") != saved["schedule"]
    assert_same(state, {name: value for name, value in saved.items() if name != "schedule"})


def test_only_what_is_asked_for_is_loaded_and_masters_follow_the_weights(tmp_path):
    run_distributed(2, _parts, str(tmp_path))


def _strictness(folder):
    rank = dist.get_rank()
    engine = trained(JOB, 2, rank)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    saved = snapshot(engine)
    content = torch.load(Path(folder, "global_step2", "mp_rank_00_model_states.pt"), weights_only=True)
    assert "frozen.weight" not in content["module"] and content["frozen_param_shapes"] is None
    assert "norm.seen" in content["module"] and "head.weight" in content["module"]

    other = another_engine(JOB)
    before = snapshot(other)
    with pytest.raises(CheckpointError, match="frozen.weight: missing in the file"):
        other.load_checkpoint(folder)
    assert_same(snapshot(other), before)
    other.load_checkpoint(folder, load_module_strict=False)
    state = snapshot(other)
    for name in ("frozen.weight", "frozen.bias"):
        assert torch.equal(state.pop(name), before[name])
        saved.pop(name)
    assert_same(state, saved)


def test_frozen_parameters_can_be_left_out_and_then_strictness_decides(tmp_path):
    run_distributed(2, _strictness, str(tmp_path))


def _client_state(folder):
    rank = dist.get_rank()
    engine = trained(JOB, 1, rank)
    given = {
        "epoch": 7,
        "note": "x",
        "t": torch.arange(4.0),
        "deep": {"list": [1, 2.5, None]},
        "global_steps": 1,
    }
    engine.save_checkpoint(folder, tag=5, client_state=given)
    assert Path(folder, "5").is_dir() and Path(folder, "latest").read_text() == "5"
    path, state = another_engine(JOB).load_checkpoint(folder)
    assert path == str(Path(folder, "5", "mp_rank_00_model_states.pt"))
    assert torch.equal(state.pop("t"), given["t"])
    assert {key: state[key] for key in ("epoch", "note", "deep")} == {
        key: given[key] for key in ("epoch", "note", "deep")
    }
    assert not {"module", "optimizer", "lr_scheduler", "frozen_param_fragments"} & set(state)
    for key in ("module", "global_steps"):
        with pytest.raises(CheckpointError, match=f"client_state.{key}"):
            engine.save_checkpoint(folder, tag="refused", client_state={key: 99})
    dist.barrier()  # each rank clears its own files away
    assert not list(Path(folder, "refused").iterdir())


def test_client_state_comes_back_and_may_not_contradict_the_file(tmp_path):
    run_distributed(2, _client_state, str(tmp_path))


class Settings:
    """A class of the client's."""

    rate = 3


def _classes(folder):
    rank = dist.get_rank()
    engine = trained(JOB, 1, rank)
    engine.save_checkpoint(
        folder, tag="a", client_state={"args": argparse.Namespace(lr=0.1), "at": Path("/x")}
    )
    _, state = engine.load_checkpoint(folder)
    assert state["args"] == argparse.Namespace(lr=0.1) and state["at"] == Path("/x")
    with captured_log() as messages:
        engine.save_checkpoint(folder, tag="b", client_state={"mine": {"settings": Settings()}})
    if rank == 0:
        assert any("client_state.mine.settings" in m and "Settings" in m for m in messages)
    with pytest.raises(CheckpointError, match="add_safe_globals"):
        engine.load_checkpoint(folder)
    torch.serialization.add_safe_globals([Settings])
    _, state = engine.load_checkpoint(folder)
    assert isinstance(state["mine"]["settings"], Settings)


def test_classes_in_client_state_are_named_at_the_save_and_load_when_the_program_allows_them(tmp_path):
    run_distributed(2, _classes, str(tmp_path))


def _sixteen_bits(folder):
    rank = dist.get_rank()
    engine = trained(JOB, 1, rank)
    assert engine.save_16bit_model(folder) is True
    assert engine.save_fp16_model(folder, "other.bin") is True
    engine.save_16bit_model(folder, "trainable.bin", exclude_frozen_parameters=True)
    weights = torch.load(Path(folder, "pytorch_model.bin"), weights_only=True)
    assert weights.keys() == engine.module.state_dict().keys()
    for name, value in engine.module.state_dict().items():
        assert torch.equal(weights[name], value) and weights[name].dtype == value.dtype
    trainable = torch.load(Path(folder, "trainable.bin"), weights_only=True)
    assert weights.keys() - trainable.keys() == {"frozen.weight", "frozen.bias"}
    assert not list(Path(folder).glob("*.tmp"))


def test_save_16bit_model_writes_the_weights_as_they_are(tmp_path):
    run_distributed(2, _sixteen_bits, str(tmp_path))


def _hooks(folder):
    """Clients replace these methods, and pass a loader of their own."""
    rank = dist.get_rank()
    engine = trained(JOB, 1, rank)
    plain = engine.module_state_dict
    engine.module_state_dict = lambda **kwargs: OrderedDict(plain(**kwargs), extra=torch.ones(2))
    engine.save_checkpoint(folder)
    del engine.module_state_dict
    seen = {}

    def load(src, dst):
        seen.update(src)
        dst.load_state_dict(src, strict=False)

    other = another_engine(JOB)
    other.load_checkpoint(folder, custom_load_fn=load)
    assert "extra" in seen
    assert_same(snapshot(other), snapshot(engine))
    names = list(inspect.signature(engine.save_checkpoint).parameters)
    assert names == ["save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters"]
    names = list(inspect.signature(engine.load_checkpoint).parameters)
    assert names == [
        "load_dir",
        "tag",
        "load_module_strict",
        "load_optimizer_states",
        "load_lr_scheduler_states",
        "load_module_only",
        "custom_load_fn",
    ]


def test_a_patched_state_dict_is_saved_and_a_custom_loader_is_called(tmp_path):
    run_distributed(2, _hooks, str(tmp_path))


def _without_optimizer(folder):
    import deepspeed
    from tests.compat.peer_job import Model, config

    rank = dist.get_rank()
    trained(JOB, 1, rank).save_checkpoint(folder)
    settings = {k: v for k, v in config(JOB).items() if k not in ("optimizer", "scheduler")}
    settings["zero_optimization"] = {"stage": 0}
    evaluator = deepspeed.initialize(model=Model(), config=settings)[0]
    path, _ = evaluator.load_checkpoint(folder)
    weights = torch.load(path, weights_only=True)["module"]
    for name, value in evaluator.module.state_dict().items():
        assert torch.equal(value, weights[name])
    evaluator.save_checkpoint(folder, tag="weights")
    engine = another_engine(JOB)
    with pytest.raises(CheckpointError, match="load_optimizer_states=False"):
        engine.load_checkpoint(folder, tag="weights")
    engine.load_checkpoint(folder, tag="weights", load_optimizer_states=False)
    train(engine, 1, rank)


def test_an_engine_without_optimizer_saves_and_loads_weights(tmp_path):
    run_distributed(2, _without_optimizer, str(tmp_path))


def _smaller_over_larger(folder):
    rank = dist.get_rank()
    engine = trained(JOB, 1, rank)
    engine.save_checkpoint(folder, tag="same")


def test_saving_over_a_checkpoint_of_more_ranks_leaves_none_of_its_files(tmp_path):
    run_distributed(3, _smaller_over_larger, str(tmp_path))
    (tmp_path / "same" / "notes.txt").write_text("the client's own file stays")
    run_distributed(2, _smaller_over_larger, str(tmp_path))
    names = sorted(path.name for path in (tmp_path / "same").iterdir())
    optims = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    assert names == [*optims, "mp_rank_00_model_states.pt", "notes.txt"]
