"""Options of Trainer around the engine: what changes no arithmetic changes no bit, the rest does its job."""

import pytest

from tests.clients.launching import clients, run_job
from tests.clients.trainer_settings import arguments, auto_config

pytestmark = clients("transformers", "accelerate")

FROM_JSON = auto_config(2, offload=True)
FROM_TRAINER = auto_config(2, offload=True, optimizer=False, scheduler=False)
# The same bits as without the option.
NEUTRAL = {
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "data-loader workers": {"dataloader_num_workers": 1},
    "evaluation and weights-only saves": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_only_model": True,
    },
}
OTHERS = {
    "no clipping": {"max_grad_norm": 0.0},
    "fp16": {"bf16": False, "fp16": True},
    "out of memory": {"auto_find_batch_size": True},
}
OF_TRAINER = {
    "AdamW": {},
    # 256 sequences, 2 ranks of 24: six micro-batches, two steps of three each.
    "an epoch": {
        "num_train_epochs": 1,
        "max_steps": -1,
        "per_device_train_batch_size": 24,
        "gradient_accumulation_steps": 3,
    },
    "Adagrad": {"optim": "adagrad"},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1},
}


def _run(name, config, options):
    run = {"name": name, "deepspeed": config, "export": True}
    return {**run, "arguments": arguments(**{"max_steps": 4, **options})}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Reports of both ranks on every option."""
    todo = [_run(name, FROM_JSON, options) for name, options in {"plain": {}, **NEUTRAL, **OTHERS}.items()]
    todo += [_run(name, FROM_TRAINER, options) for name, options in OF_TRAINER.items()]
    for run in todo:
        if run["name"] == "out of memory":
            run["memory_for"] = 2
    return run_job("trainer_job.py", todo, tmp_path_factory.mktemp("options")).check()


@pytest.mark.parametrize("name", NEUTRAL)
def test_options_beside_the_arithmetic_change_no_bit(name, runs):
    for report in runs:
        for key in ("loss", "grad_norm", "weights", "final", "eval"):
            assert report[name][key] == report["plain"][key]


@pytest.mark.parametrize("name", ["plain", *NEUTRAL, *OTHERS, *OF_TRAINER])
def test_the_model_that_is_written_out_is_the_one_that_was_trained(name, runs):
    for report in runs:
        run = report[name]
        assert run["exported"] == run["final"] == runs[0][name]["final"]
        assert run["class"] == "DeepSpeedEngine"
        assert max(run["eval"]) < run["loss"]["1"], "it learned"


def test_without_clipping_the_norm_is_the_same_and_the_step_is_not(runs):
    plain, free = runs[0]["plain"], runs[0]["no clipping"]
    assert free["grad_norm"]["1"] == plain["grad_norm"]["1"] > 0.5
    # The schedule of the JSON has a rate of 0 in the first two steps, and Adam forgets a common factor.
    assert free["weights"]["2"] == plain["weights"]["2"] and free["final"] != plain["final"]


def test_fp16_computes_like_bf16(runs):
    for step, loss in runs[0]["plain"]["loss"].items():
        # bf16 rounds a token's loss near 5 to 8 bits; 240 tokens have random signs. Four times that.
        assert runs[0]["fp16"]["loss"][step] == pytest.approx(loss, abs=4 * 5 * 2**-9 / 15)


def test_an_epoch_with_accumulation_is_stepped_as_trainer_counts(runs):
    assert list(runs[0]["an epoch"]["loss"]) == ["1", "2"]


def test_out_of_memory_frees_the_engine_and_begins_with_a_smaller_batch(runs):
    for report in runs:
        run = report["out of memory"]
        assert run["batch_sizes"] == [4, 3, 2, 2, 2, 2]
        assert len(run["loss"]) == 4
        assert sum(entry["name"] == "master[0]" for entry in run["buffers"]) == 1


def test_a_plateau_schedule_of_trainers_own_keeps_the_rate_while_the_loss_falls(runs):
    assert list(runs[0]["plateau"]["lr"].values()) == [3e-3] * 4
