"""OpenRLHF's files import, and its own strategy and trainers run on this package."""

import pytest

from tests.clients.launching import clients, run_job

pytestmark = clients("openrlhf")

SETTINGS = [
    {"name": "plain", "stage": 0, "offload": False, "dtype": "fp32"},  # torch's DDP in place of an engine
    {"name": "fp32", "stage": 2, "offload": True, "dtype": "fp32"},
    {"name": "offload", "stage": 2, "offload": True, "dtype": "bf16"},
    {"name": "stage 2", "stage": 2, "offload": False, "dtype": "bf16"},
    {"name": "stage 1", "stage": 1, "offload": False, "dtype": "bf16"},
    {"name": "lora", "stage": 2, "offload": True, "dtype": "bf16", "lora": True},
]
ENGINES = [setting["name"] for setting in SETTINGS[1:]]
WHOLE_MODEL_BF16 = ["offload", "stage 2", "stage 1"]

# In fp32 the same sums are taken in another order: a few ulp of a loss near 4, carried through four steps.
FP32_BOUND = 1e-5
# bf16 rounds weights and activations to 8 bits, which moves logits of size 0.3 by some 2**-10 at each of the
# two layers' seven products. Largest difference seen: 0.002, of a norm.
BF16_BOUND = 0.01


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_job("openrlhf_job.py", SETTINGS, tmp_path_factory.mktemp("openrlhf"), "deepspeed").check()


def test_its_files_import(ranks):
    for rank in ranks:
        assert rank["imported"] == [
            "openrlhf.utils.deepspeed.deepspeed",
            "openrlhf.utils.deepspeed.deepspeed_utils",
            "openrlhf.models.model",
            "openrlhf.models.utils",
            "openrlhf.trainer.ray.ppo_actor",
        ]


def test_supervised_training_is_that_of_plain_torch(ranks):
    for rank in ranks:
        reference = rank["plain"]["logs"]
        assert [log["step"] for log in reference] == [1, 2, 3, 4]
        assert reference[3]["loss_mean"] < reference[1]["loss_mean"] - 0.05, "it must learn to mean anything"
        for name, bound in [("fp32", FP32_BOUND), *((name, BF16_BOUND) for name in WHOLE_MODEL_BF16)]:
            logs = rank[name]["logs"]
            assert rank[name]["engine"]
            assert [(log["step"], log["lr"]) for log in logs] == [
                (log["step"], log["lr"]) for log in reference
            ]
            for key in ("gpt_loss", "loss_mean", "grad_norm"):
                expected = [log[key] for log in reference]
                assert [log[key] for log in logs] == pytest.approx(expected, abs=bound), (name, key)


@pytest.mark.parametrize("name", ENGINES)
def test_its_checkpoints_continue_bit_for_bit(ranks, name):
    for rank in ranks:
        assert rank[name]["resumes"]
        assert rank[name]["resumed_logs"] == rank[name]["logs"][2:]


@pytest.mark.parametrize("name", ENGINES)
def test_it_exports_evaluates_averages_and_sleeps(ranks, name):
    for rank in ranks:
        assert rank[name]["averaged"] and rank[name]["evaluation_is_finite"]
        assert rank[name]["evaluation_optimizer"] is None
        assert rank[name].get("exported", name == "lora")


def test_only_adapters_move_under_lora(ranks):
    for rank in ranks:
        assert rank["lora"]["frozen_moved"] == [] and rank["lora"]["trained_moved"]


def test_several_backward_passes_before_a_step_are_those_of_plain_torch(ranks):
    for rank in ranks:
        reference = rank["plain"]["policy"]
        assert reference["backward_passes"] == 2 * reference["steps"] == 8
        for name, bound in [("fp32", FP32_BOUND), *((name, BF16_BOUND) for name in WHOLE_MODEL_BF16)]:
            policy = rank[name]["policy"]
            for key in ("steps", "backward_passes", "rate"):
                assert policy[key] == reference[key], (name, key)
            for key in ("loss", "norm"):
                assert policy[key] == pytest.approx(reference[key], abs=bound), (name, key)
        # In bf16 Adam moves a weight whose gradient is next to nothing by a whole step, this way or that.
        assert rank["fp32"]["policy"]["weights"] == pytest.approx(reference["weights"], abs=FP32_BOUND)


@pytest.mark.parametrize("name", ["fp32", *WHOLE_MODEL_BF16])
def test_every_weight_is_sent_to_inference_once(ranks, name):
    first, second = (rank[name]["policy"] for rank in ranks)
    assert first["sent"] == first["names"] and len(first["names"]) == 20
    assert second["sent"] == []
