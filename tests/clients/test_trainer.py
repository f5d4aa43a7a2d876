"""transformers' Trainer with a DeepSpeed JSON full of "auto": trains, is killed, resumes, agrees with DDP."""

import pytest

from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.clients.jobs.common import digest
from tests.clients.launching import clients, run_job
from tests.clients.trainer_settings import arguments, auto_config

pytestmark = clients("transformers", "accelerate")

STEPS = [str(step) for step in range(1, 9)]
AFTER_SAVE = STEPS[4:]
CONFIGS = {
    # Optimizer and schedule from the JSON; then only the optimizer, Trainer's schedule; then Trainer's both.
    "stage 2, offload": auto_config(2, offload=True),
    "stage 1, offload": auto_config(1, offload=True, scheduler=False),
    "stage 2": auto_config(2, offload=False, optimizer=False, scheduler=False),
}
# What each is compared with. Trainer's own AdamW decays no norms, the JSON's decays all parameters.
FP32_REFERENCES = {
    "DDP, fp32": {"deepspeed": None, "arguments": arguments(bf16=False)},
    "DDP, fp32, no decay": {"deepspeed": None, "arguments": arguments(bf16=False, weight_decay=0.0)},
}
FP32_CONFIGS = {
    "stage 2, offload, fp32": (auto_config(2, offload=True, scheduler=False), "DDP, fp32, no decay"),
    "stage 1, fp32": (auto_config(1, offload=False, optimizer=False, scheduler=False), "DDP, fp32"),
    # Trainer's AdamW, which accelerate replaces by DeepSpeedCPUAdam.
    "AdamW of Trainer, offload, fp32": (auto_config(1, True, optimizer=False, scheduler=False), "DDP, fp32"),
}
# The best model is to be another than the last: the one with the larger loss, on purpose.
SAVING = {
    "save_strategy": "steps",
    "save_steps": 4,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
}


def _cut_runs():
    """Runs that end after step 6, two steps after a save; the last of them is killed."""
    runs = [
        {
            "name": f"cut: {name}",
            "folder": f"cut: {name}",
            "deepspeed": config,
            "arguments": arguments(**SAVING),
            "stop_after": 6,
        }
        for name, config in CONFIGS.items()
    ]
    runs[0]["kill_after"] = runs[0].pop("stop_after")
    return runs[::-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def whole(folder):
    """Reports of both ranks on runs without interruption; then others are cut, the last one by SIGKILL."""
    runs = [{"name": "DDP", "deepspeed": None, "arguments": arguments()}]
    runs += [{"name": name, **run} for name, run in FP32_REFERENCES.items()]
    runs += [
        {"name": name, "deepspeed": config, "arguments": FP32_REFERENCES[reference]["arguments"]}
        for name, (config, reference) in FP32_CONFIGS.items()
    ]
    runs += [
        {"name": name, "deepspeed": config, "arguments": arguments(**SAVING)}
        for name, config in CONFIGS.items()
    ]
    job = run_job("trainer_job.py", runs + _cut_runs(), folder)
    assert job.returncode != 0 and "SIGKILL" in job.output, job.output[-6000:]
    assert len(job.reports[0]) == len(runs) + len(CONFIGS) - 1, "all but the killed one have reported"
    return job.reports


@pytest.fixture(scope="module")
def resumed(folder, whole):
    runs = [{**run, "resume": True} for run in _cut_runs()]
    for run in runs:
        run.pop("stop_after", None), run.pop("kill_after", None)
    return run_job("trainer_job.py", runs, folder).check()


def test_every_run_went_through_the_engine(whole):
    for report in whole:
        classes = {name: run["class"] for name, run in report.items()}
        for name in ("DDP", *FP32_REFERENCES):
            assert classes.pop(name) == "DistributedDataParallel"
        assert set(classes.values()) == {"DeepSpeedEngine"}


def test_ranks_hold_the_same_weights_and_training_learns(whole):
    first, second = whole
    for name, run in first.items():
        assert run["weights"] == second[name]["weights"]
        assert run["loss"]["8" if "cut" not in name else "6"] < run["loss"]["1"] - 0.1


@pytest.mark.parametrize("name", FP32_CONFIGS)
def test_fp32_losses_agree_with_plain_ddp_to_rounding(name, whole):
    run, ddp = whole[0][name], whole[0][FP32_CONFIGS[name][1]]
    for step in STEPS:
        # A few roundings of 2^-24 in each step's gradient, clipping and update, and a loss near 5.
        assert run["loss"][step] == pytest.approx(ddp["loss"][step], abs=8 * 4 * 2**-24 * 5)
        assert run["grad_norm"][step] == pytest.approx(ddp["grad_norm"][step], rel=2**-16)


@pytest.mark.parametrize("name", ["stage 1, offload", "stage 2"])
def test_bf16_losses_agree_with_plain_ddp_to_bf16(name, whole):
    """DDP computes under autocast from fp32 weights, the engine from bf16 weights.

    A token's loss near 5 rounds to 8 bits, an error of up to 5 * 2^-9; the mean over 240 tokens of a step, of
    random signs, has a fifteenth of it. Four times that is allowed; a schedule that is off by one step shows
    as ten times what is allowed.
    """
    run, ddp = whole[0][name], whole[0]["DDP"]
    for step in STEPS:
        assert run["loss"][step] == pytest.approx(ddp["loss"][step], abs=4 * 5 * 2**-9 / 15)


def test_schedules_from_the_json_and_from_trainer_reach_the_optimizer(whole):
    rising_and_falling = [0.0015, 0.003, 0.0025, 0.002, 0.0015, 0.001, 0.0005, 0.0]
    seen = {name: list(run["lr"].values()) for name, run in whole[0].items()}
    # What Trainer logs: the rate of the step that comes next if the engine steps the schedule.
    assert seen["stage 1, offload"] == pytest.approx(rising_and_falling)
    assert seen["stage 2"] == seen["DDP"] == pytest.approx([0.0, *rising_and_falling[:-1]])
    # DeepSpeed's schedules lag a step behind: its first two steps have the rate 0.
    assert seen["stage 2, offload"] == pytest.approx([0.0, *rising_and_falling[:-1]])
    assert whole[0]["stage 2, offload"]["weights"]["1"] == whole[0]["stage 2, offload"]["weights"]["2"]


@pytest.mark.parametrize("name", CONFIGS)
def test_killed_and_resumed_equals_never_interrupted_bit_for_bit(name, whole, resumed, folder):
    for before, after in zip(whole, resumed, strict=True):
        run, again = before[name], after[f"cut: {name}"]
        for key in ("loss", "grad_norm", "lr"):
            assert again[key] == run[key], "also of the steps before, which the checkpoint remembers"
        assert again["weights"] == {step: run["weights"][step] for step in AFTER_SAVE}
    masters = [
        digest(get_fp32_state_dict_from_zero_checkpoint(str(folder / place / "checkpoint-8")))
        for place in (name, f"cut: {name}")
    ]
    assert masters[0] == masters[1]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_best_model_is_loaded_at_the_end(name, whole, resumed):
    for run in (whole[0][name], resumed[0][f"cut: {name}"]):
        assert run["best"].endswith("checkpoint-4")
        assert run["final"] == whole[0][name]["weights"]["4"] != whole[0][name]["weights"]["8"]


def test_offload_holds_16_bytes_a_parameter_and_two_buckets(whole):
    for report in whole:
        buffers = report["stage 2, offload"]["buffers"]
        shard, embedding = 28832 // 2, 128 * 32
        names = ["master[0]", "gradient[0]", "exp_avg[0]", "exp_avg_sq[0]"]
        # "auto" gives buckets of hidden_size^2 elements, less than the embedding.
        expected = [(name, 4 * shard) for name in names] + [("bucket", 2 * embedding)] * 2
        assert sorted((entry["name"], entry["nbytes"]) for entry in buffers) == sorted(expected)
        assert not any(entry["pinned"] for entry in buffers), "there is no GPU to page-lock for"
