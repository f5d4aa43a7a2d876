"""Lightning's Trainer and Fabric train on this package, and their checkpoints continue bit for bit."""

import math

import pytest

from tests.clients.launching import clients, run_job

pytestmark = clients("lightning")

# In fp32 the same sums are taken in another order: a few ulp of a loss near 1 after nine steps.
FP32_BOUND = 1e-5
# bf16 rounds weights and activations to 8 bits: logits of size 2 move by some 2**-8 at each of three layers,
# and a cross entropy by at most twice what its logits do. Largest difference seen: 0.011.
BF16_BOUND = 0.03
CLIP = 0.5
ACCUMULATION = 2
TRAINER_STEPS = 9

# A config of a user's own, with optimizer and schedule in it: Lightning then makes neither.
JSON = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-2, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 4, "warmup_type": "linear"},
    },
}
# The first scale is small enough that no step is skipped.
FP16 = {"stage": 2, "offload_optimizer": True, "initial_scale_power": 8}


def trainer_setting(name, strategy, precision="bf16-mixed", optimizer="AdamW", **more):
    return {
        "name": name,
        "strategy": strategy,
        "precision": precision,
        "optimizer": optimizer,
        "clip": CLIP,
        **more,
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each rank saw of each setting of the Trainer."""
    settings = [
        # The Trainer divides a loss by its accumulation, and under DeepSpeed, stock's too, the engine does so
        # again. AdamW does not feel it; the clipping does.
        trainer_setting("ddp", "ddp", "32-true") | {"clip": CLIP * ACCUMULATION},
        trainer_setting("fp32", "deepspeed_stage_2_offload", "32-true"),
        trainer_setting("offload", "deepspeed_stage_2_offload", optimizer="DeepSpeedCPUAdam"),
        trainer_setting("stage 2", "deepspeed_stage_2"),
        trainer_setting("stage 1", "deepspeed_stage_1"),
        trainer_setting("json", "deepspeed", "32-true", config=JSON),
        trainer_setting("fp16", "deepspeed", "16-mixed", options=FP16),
        trainer_setting("manual ddp", "ddp", "32-true", manual=True),
        trainer_setting("manual", "deepspeed_stage_2_offload", "32-true", manual=True),
        trainer_setting("plateau ddp", "ddp", "32-true", schedule="plateau") | {"clip": CLIP * ACCUMULATION},
        trainer_setting("plateau", "deepspeed_stage_2", "32-true", schedule="plateau"),
    ]
    return run_job("lightning_trainer_job.py", settings, tmp_path_factory.mktemp("trainer"), "itself").check()


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    """What each rank saw of each setting of Fabric."""
    settings = [
        {"name": "ddp", "strategy": "ddp", "precision": "32-true"},
        {"name": "fp32", "strategy": "deepspeed_stage_2_offload", "precision": "32-true"},
        {"name": "offload", "strategy": "deepspeed_stage_2_offload", "precision": "bf16-mixed"},
        {"name": "stage 2", "strategy": "deepspeed_stage_2", "precision": "bf16-mixed"},
        {"name": "stage 1", "strategy": "deepspeed_stage_1", "precision": "bf16-true"},
    ]
    return run_job("lightning_fabric_job.py", settings, tmp_path_factory.mktemp("fabric")).check()


def distance(losses, expected):
    assert len(losses) == len(expected)
    return max(abs(one - other) for one, other in zip(losses, expected, strict=True))


@pytest.mark.parametrize("job", ["trained", "fabric"])
def test_losses_are_those_of_plain_ddp(job, request):
    for rank in request.getfixturevalue(job):
        reference = rank["ddp"]["losses"]
        assert distance(rank["fp32"]["losses"], reference) < FP32_BOUND
        for name in ("offload", "stage 2", "stage 1"):
            assert distance(rank[name]["losses"], reference) < BF16_BOUND, name
        first, last = (sum(losses) / 4 for losses in (reference[:4], reference[-4:]))
        assert last < first - 0.1, "training changed nothing, so agreement would prove nothing"


def test_the_trainer_steps_and_schedules_as_under_ddp(trained):
    for rank in trained:
        for name in ("fp32", "offload", "stage 2", "stage 1"):
            assert rank[name]["rates"] == rank["ddp"]["rates"], name
            assert rank[name]["steps"] == rank[name]["engine_steps"] == TRAINER_STEPS
            assert rank[name]["class"] == "DeepSpeedZeroOptimizer"
        assert rank["offload"]["inner_class"] == "DeepSpeedCPUAdam"
        assert rank["stage 1"]["inner_class"] == "AdamW"
    norms = [rank["fp32"]["norm"] for rank in trained]
    assert norms[0] == norms[1] and math.isfinite(norms[0]) and norms[0] > 0


def test_the_host_keeps_16_bytes_a_parameter_with_accumulation(trained):
    results = [rank["offload"] for rank in trained]
    kept = sum(nbytes for one in results for nbytes in one["buffers"].values())
    assert kept == 16 * results[0]["numel"]
    assert all(rank["stage 2"]["buffers"] == {} for rank in trained)


def test_fp16_scales_and_loses_less_than_bf16(trained):
    for rank in trained:
        # fp16 keeps 11 bits where bf16 keeps 8.
        assert distance(rank["fp16"]["losses"], rank["ddp"]["losses"]) < BF16_BOUND / 8
        assert rank["fp16"]["engine_steps"] == TRAINER_STEPS


@pytest.mark.parametrize("name", ["manual", "plateau"])
def test_manual_optimization_and_a_plateau_schedule_are_as_under_ddp(trained, name):
    for rank in trained:
        result, reference = rank[name], rank[f"{name} ddp"]
        assert distance(result["losses"], reference["losses"]) < FP32_BOUND
        assert result["rates"] == reference["rates"] and len(set(result["rates"])) > 1
        assert result["steps"] == result["engine_steps"] == reference["steps"]


def test_a_module_is_validated_within_fit_and_by_an_engine_of_its_own(trained):
    for rank in trained:
        for name in ("fp32", "offload", "stage 2", "stage 1", "fp16"):
            result = rank[name]
            assert result["validated"] == pytest.approx(result["validated_again"], abs=1e-6), name
            assert result["validated"] < result["losses"][0]


def test_optimizer_and_schedule_of_a_json_are_the_trainers(trained):
    for rank in trained:
        rates = rank["json"]["rates"][::ACCUMULATION]  # the monitor reads one at every micro-batch
        # As in stock, the first step of a WarmupLR leaves it at its beginning.
        assert rates == pytest.approx([2e-2 * min(max(step - 1, 0), 4) / 4 for step in range(TRAINER_STEPS)])
        assert rank["json"]["engine_steps"] == TRAINER_STEPS
        assert sum(rank["json"]["losses"][-4:]) < sum(rank["json"]["losses"][:4]) - 0.4


@pytest.mark.parametrize("name", ["offload", "stage 2", "stage 1"])
def test_the_trainers_checkpoints_continue_evaluate_and_export(trained, name):
    for rank in trained:
        result, checkpoints = rank[name], rank[name]["checkpoints"]
        resumed = checkpoints["resumed"]
        assert resumed["losses"] == result["losses"][-len(resumed["losses"]) :]
        assert len(resumed["losses"]) == len(result["losses"]) * 2 // 3
        assert resumed["weights"] == result["weights"]
        assert resumed["rates"] == result["rates"][-len(resumed["rates"]) :]
        assert resumed["steps"] == resumed["engine_steps"] == TRAINER_STEPS
        assert checkpoints["evaluated"] == checkpoints["exported"] == result["weights"]
        assert 0 < checkpoints["evaluated_loss"] < max(result["losses"][:6])
        assert checkpoints["exported_epoch"] == 2


@pytest.mark.parametrize("name", ["fp32", "offload", "stage 2", "stage 1"])
def test_fabrics_checkpoints_continue(fabric, name):
    for rank in fabric:
        result, loads = rank[name], rank[name]["loads"]
        assert loads["losses"] == result["losses"][-len(loads["losses"]) :]
        assert len(loads["losses"]) == len(result["losses"]) // 2
        assert loads["weights"] == result["weights"] != result["saved_weights"] == loads["alone"]
        assert loads["words"] == {"anything": "else"}
        assert "not a valid DeepSpeed checkpoint: nothing.ckpt" in loads["missing"]


def test_fabrics_wrapper_of_the_optimizer_derives_from_ours_and_shadows_nothing(fabric):
    for rank in fabric:
        for name in ("fp32", "offload", "stage 2", "stage 1"):
            wrapper = rank[name]["wrapper"]
            assert wrapper["class"] == "FabricDeepSpeedZeroOptimizer"
            assert wrapper["is_deepspeed"] and wrapper["engine"]
            assert wrapper["shares_groups"] and wrapper["rate_is_live"]
            assert wrapper["shadows"] == []
            assert wrapper["norm"] > 0
            assert ("master[0]" in wrapper["reports"]) == (name in ("fp32", "offload"))


@pytest.mark.parametrize("strategy", ["deepspeed_stage_3", "deepspeed_stage_3_offload"])
def test_stage_3_is_refused_on_every_rank_with_what_to_do(trained, strategy):
    for rank in trained:
        assert rank["refused"][strategy] == (
            "NotImplementedError: deepspeed.zero.Init: expected a feature of this package, got ZeRO stage 3, "
            "which is not here. Set zero_optimization.stage to 2 or less; optimizer states go to the host "
            "with offload_optimizer."
        )
