"""Habits of accelerate's users: its own configuration file, several engines, skipped steps, compiling."""

import pytest

from tests.clients.launching import clients, run_job

pytestmark = clients("accelerate", "transformers")

# What `accelerate config` writes for stage 2 with offload.
FILE = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 0.7
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 2
distributed_type: DEEPSPEED
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: false
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("habits")
    (folder / "accelerate.yaml").write_text(FILE)
    flags = ["--config_file=accelerate.yaml"]
    return run_job("accelerate_habits_job.py", None, folder, "accelerate", flags).check()


def test_accelerates_own_configuration_file_reaches_the_engine(reports):
    for report in reports:
        found = report["from_the_file"]
        zero = found["zero_optimization"]
        assert (found["gradient_clipping"], zero["stage"], found["bf16"]) == (0.7, 2, True)
        assert zero["offload_optimizer"]["device"] == "cpu"
        assert found["losses"][-1] < found["losses"][0]


def test_a_teacher_without_an_optimizer_stands_beside_a_student_that_trains(reports):
    for report in reports:
        found = report["teacher_and_student"]
        assert found == {"teacher, student unchanged": [True, False], "stages": [0, 2]}


def test_a_torch_schedule_waits_while_steps_are_skipped(reports):
    for report in reports:
        found = report["skipped_steps"]
        steps = found["skipped, rate moved"]
        assert all(skipped != moved for skipped, moved in steps)
        assert steps[0][0] and not steps[-1][0], "the scale starts too high and is found"
        assert sum(skipped for skipped, _ in steps) == found["count"]


def test_a_second_engine_over_a_model_trains_as_over_a_copy_of_it(reports):
    over_model, over_copy = reports[0]["the_same_model_twice"]
    assert over_model == over_copy


def test_evaluation_generation_and_compiling(reports):
    for report in reports:
        found = report["evaluate_generate_and_compile"]
        assert found["tokens"] == 7 and found["same keys"]
        assert found["compiled"][-1] < found["compiled"][0]
        # Two ranks get other sequences of the same kind; an untrained model knows nothing: ln 128 = 4.85.
        assert found["loss"] == pytest.approx(4.85, abs=0.1)
