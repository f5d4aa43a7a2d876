"""What training costs the host in bytes a parameter: 16, or 14 when a gradient arrives once a step."""

import pytest

from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from tests.memory.job import MIB, Job, run_job

# What does not grow with the model: a gradient bucket (4 MiB here), gradients of single layers on their way
# (2 MiB each), the interpreter's and the C heap's own. Three quarters of a byte a parameter of these models;
# measured: 10 to 16 MiB.
CONSTANT = 24 * MIB
# With several ranks also a second bucket, what is received, and more gradients of single layers at a time,
# of which the C heap keeps some for the next step. Measured: up to 51 MiB.
CONSTANT_OF_RANKS = 80 * MIB
# Heap blocks that come and go between two measurements. Measured: up to 4 MiB, with several ranks up to 26.
JITTER = 8 * MIB
JITTER_OF_RANKS = 40 * MIB
# A gradient of a layer is 4 MiB in fp32; the C heap has one of them resident, or four. Measured: 8 to 26.
CONSTANT_OF_FP32 = 36 * MIB
JITTER_OF_FP32 = 20 * MIB
# A worker is an interpreter whose pages were copied as it wrote to them. Measured: 32 MiB.
WORKER = 64 * MIB


def assert_costs(result, bytes_a_param, numel, constant=CONSTANT, jitter=JITTER):
    """Every phase holds what arithmetic says, its peak too, and nothing is added after the first step."""
    arithmetic = bytes_a_param * numel
    for name, phase in result.phases.items():
        held = {"rss": phase.rss, "tree": phase.tree, "peak": phase.peak}
        assert max(held.values()) < arithmetic + constant, (
            name,
            {key: value / numel for key, value in held.items()},
        )
        assert phase.rss > arithmetic - jitter, f"{name}: the measurement itself sees the buffers"
    last = max(name for name in result.phases if name.startswith("step"))
    assert result[last].rss - result["step1"].rss < jitter
    assert result[last].tree - result["step1"].tree < jitter


@pytest.mark.parametrize("gas, bytes_a_param", [(1, 14), (2, 16)])
def test_bf16_costs_14_bytes_without_accumulation_and_16_with_it(gas, bytes_a_param):
    job = Job(gas=gas)
    (result,) = run_job(job)
    assert_costs(result, bytes_a_param, job.numel)
    estimated, _ = estimate_zero2_model_states_mem_needs(job.numel, gradient_accumulation_steps=gas)
    assert abs(result["step4"].rss / estimated - 1) < 0.05, "the estimator says what is measured"


def test_four_groups_and_pin_memory_add_nothing_and_the_engines_own_account_agrees():
    """Without a GPU there is nothing to page-lock for."""
    job = Job(groups=4, pin=True)
    (result,) = run_job(job)
    assert_costs(result, 14, job.numel)
    assert result.locked == 0 and not any(entry["pinned"] for entry in result.ledger)
    accounted = sum(entry["nbytes"] for entry in result.ledger)
    assert abs(result["step4"].rss - accounted) < CONSTANT
    assert 14 * job.numel <= accounted <= 14 * job.numel + 4 * MIB + 4096, "and the bucket"


def test_fp32_training_costs_16_bytes_beside_the_weights():
    job = Job(layers=32, dtype="fp32")
    assert_costs(run_job(job)[0], 16, job.numel, CONSTANT_OF_FP32, JITTER_OF_FP32)


def test_initialize_casts_and_copies_without_a_second_model():
    """The model comes in fp32 and leaves in bf16: 2 bytes a parameter less, at no time more."""
    job = Job(model_dtype="fp32")
    assert_costs(run_job(job)[0], 14 - 2, job.numel)


@pytest.mark.parametrize("gas, bytes_a_param, fork_at", [(1, 14, "initialize"), (2, 16, "step1")])
def test_forked_workers_duplicate_only_the_models_own_weights(gas, bytes_a_param, fork_at):
    """2 bytes a parameter: the bf16 weights, on the host only because there is no GPU.

    Buffers are not shared.
    """
    job = Job(gas=gas, workers=2, fork_at=fork_at)
    (result,) = run_job(job)
    forked, last = result["workers"], result["step4"]
    assert last.tree - forked.tree < 2 * job.numel + CONSTANT
    assert last.tree < (bytes_a_param + 2) * job.numel + CONSTANT + 2 * WORKER
    assert last.rss < bytes_a_param * job.numel + CONSTANT
    assert last.tree > last.rss + job.numel, "the measurement itself sees what a fork duplicates"


def test_frozen_parameters_cost_nothing():
    job = Job(frozen_layers=29)
    assert job.trainable_numel < 0.1 * job.numel
    assert_costs(run_job(job)[0], 14, job.trainable_numel)


def test_two_ranks_share_what_one_holds():
    """Each rank holds half, so that all together hold what one alone would: no full copy on any."""
    job = Job(layers=48)
    ranks = run_job(job, world=2)
    for result in ranks:
        assert_costs(result, 14 / 2, job.numel, CONSTANT_OF_RANKS, JITTER_OF_RANKS)
    total = sum(result["step4"].rss for result in ranks)
    assert abs(total - 14 * job.numel) < 2 * CONSTANT_OF_RANKS
