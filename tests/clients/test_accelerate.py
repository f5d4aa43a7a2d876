"""accelerate by each of its ways to DeepSpeed: trains, saves, goes on bit for bit, agrees with plain DDP."""

import json

import pytest

from tests.clients.launching import clients, run_job

pytestmark = clients("accelerate", "transformers")

OFFLOAD = {"zero_stage": 2, "offload_optimizer_device": "cpu", "gradient_clipping": 0.5}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
# The schedule of the config: DeepSpeed's own.
WARMUP = {
    "type": "WarmupLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "warmup_type": "linear",
    },
}
CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"},
    "optimizer": ADAMW,
}
KEEPS_ADAMW = {key: value for key, value in CONFIG.items() if key != "optimizer"}
KEEPS_ADAMW["zero_force_ds_cpu_optimizer"] = False
FP32 = {
    "stage 2, offload, fp32": {"plugin": OFFLOAD, "schedule": "torch"},
    "stage 1, fp32": {"plugin": {**OFFLOAD, "zero_stage": 1, "offload_optimizer_device": "none"}},
    "stage 0, fp32": {"plugin": {"zero_stage": 0, "gradient_clipping": 0.5}},
    # accelerate leaves the script's AdamW alone, and the engine runs it on the host.
    "torch's AdamW on the host, fp32": {"plugin": {"hf_ds_config": KEEPS_ADAMW}},
    "dummies with a callable, fp32": {
        "plugin": {"hf_ds_config": CONFIG},
        "dummy": True,
        "schedule": "callable",
    },
}
BF16 = {
    "stage 2, offload": {"plugin": OFFLOAD},
    "stage 1, offload": {"plugin": {**OFFLOAD, "zero_stage": 1}},
    "stage 2": {"plugin": {"zero_stage": 2, "gradient_clipping": 0.5}},
    "stage 1": {"plugin": {"zero_stage": 1, "gradient_clipping": 0.5}},
}
ENGINES = [*FP32, *BF16]


def _runs(precision, runs):
    return [{"name": name, "precision": precision, "schedule": "torch", **run} for name, run in runs.items()]


@pytest.fixture(scope="module")
def by_plugin(tmp_path_factory):
    """Reports of both ranks on runs whose DeepSpeedPlugin is built in code, and on plain DDP."""
    runs = _runs("no", {"DDP, fp32": {"plugin": None}, **FP32})
    runs += _runs("bf16", {"DDP": {"plugin": None}, **BF16})
    folder = tmp_path_factory.mktemp("accelerate")
    return run_job("accelerate_job.py", runs, folder, "accelerate", ["--multi_gpu"]).check()


def steps(report, name, key):
    return [step[key] for step in report[name]["steps"]]


@pytest.mark.parametrize("name", FP32)
def test_fp32_agrees_with_plain_ddp_to_rounding(name, by_plugin):
    """A few roundings of 2^-24 in each step's gradient, clipping and update, and a loss near 5."""
    for report in by_plugin:
        for key, bound in {"loss": {"abs": 8 * 4 * 2**-24 * 5}, "norm": {"rel": 2**-16}, "lr": {}}.items():
            assert steps(report, name, key) == pytest.approx(steps(report, "DDP, fp32", key), **bound)


@pytest.mark.parametrize("name", BF16)
def test_bf16_agrees_with_plain_ddp_to_bf16(name, by_plugin):
    """A token's loss near 5 rounds to 8 bits; 240 tokens of a step have random signs. Four times that."""
    losses = steps(by_plugin[0], "DDP", "loss")
    assert steps(by_plugin[0], name, "loss") == pytest.approx(losses, abs=4 * 5 * 2**-9 / 15)
    assert losses[-1] < losses[0] - 0.2, "it learns"


@pytest.mark.parametrize("name", ENGINES)
def test_a_state_is_continued_bit_for_bit_by_a_new_engine_over_other_weights(name, by_plugin):
    for report in by_plugin:
        run = report[name]
        assert run["class"] == "DeepSpeedEngine"
        assert len(run["again"]) == 4 and run["again"] == run["steps"][4:]
        assert [step["weights"] for step in run["steps"]] == steps(by_plugin[0], name, "weights")


@pytest.mark.parametrize("name", ENGINES)
def test_unwrapping_exporting_and_freeing(name, by_plugin):
    for report in by_plugin:
        run = report[name]
        weights = run["steps"][-1]["weights"]
        assert run["unwrapped"] == ["LlamaForCausalLM", weights]
        assert run["exported"] == weights
        assert run["buffers"] and run["after free_memory"] == []


def test_the_flags_of_the_launcher_give_the_same_bits_as_a_plugin(by_plugin, tmp_path):
    flags = ["--use_deepspeed", "--zero_stage=2", "--offload_optimizer_device=cpu"]
    flags += ["--gradient_accumulation_steps=2", "--gradient_clipping=0.5", "--mixed_precision=bf16"]
    runs = _runs("bf16", {"stage 2, offload": {}})
    reports = run_job("accelerate_job.py", runs, tmp_path, "accelerate", flags).check()
    for seen, expected in zip(reports, by_plugin, strict=True):
        assert seen["stage 2, offload"] == expected["stage 2, offload"]


def test_a_config_file_with_optimizer_and_schedule_for_dummies(by_plugin, tmp_path):
    (tmp_path / "ds.json").write_text(
        json.dumps({**CONFIG, "scheduler": WARMUP, "bf16": {"enabled": "auto"}})
    )
    flags = ["--use_deepspeed", "--deepspeed_config_file=ds.json", "--mixed_precision=bf16"]
    runs = _runs("bf16", {"file": {"dummy": True, "schedule": "config"}})
    for report in run_job("accelerate_job.py", runs, tmp_path, "accelerate", flags).check():
        run = report["file"]
        # The rate after each step. DeepSpeed's schedules lag a step behind: the first step has the rate 0.
        assert steps(report, "file", "lr") == pytest.approx([0, 0.0015] + [0.003] * 6)
        assert run["again"] == run["steps"][4:]
        losses = steps(report, "file", "loss")
        assert losses[-1] < losses[0] - 0.2
        assert losses[0] == by_plugin[0]["stage 2, offload"]["steps"][0]["loss"], "same weights, same data"
