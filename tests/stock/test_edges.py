"""What jobs do now and then finds the patch as it would find stock."""

import pytest

from tests.stock import harness

pytestmark = harness.MARKS

HEARD = """
    import logging
    import deepspeed_lean
    from deepspeed_lean.log import log

    class Heard(logging.Handler):
        def emit(self, record):
            if record.levelno >= logging.WARNING:
                lines.append(record.getMessage())

    lines = []
    log().addHandler(Heard())
    """
ANOTHER_DEVICE = """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import stage_1_and_2
    own = stage_1_and_2.DeepSpeedZeroOptimizer
    get_accelerator().device_name = lambda index=None: "npu"
    report([deepspeed_lean.apply(), stage_1_and_2.DeepSpeedZeroOptimizer is own, lines])
    """
PLAIN_TORCH = """
    import torch, training
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    training.start()
    case = training.Case()
    stock, ours = (training.train(case, switches, 0) for switches in (None, {}))
    with training.patched({}):
        op = DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(1))]).ds_opt_adam
    report([hasattr(op, "AdamQueue"), training.same_state(stock, ours)])
    """


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return harness.results(harness.JOBS / "edges.py", str(tmp_path_factory.mktemp("edges")))[0]


def test_without_the_step_between_the_last_backward_of_a_window_counts(found):
    assert found["left out"] == {"as stock": True, "the first does not count": True}


def test_a_parameter_that_only_an_early_micro_batch_uses_is_stepped_with_its_gradient(found):
    """Stock's sum takes it in only with the last one."""
    assert found["early"] == {"stock": False, "ours": True}


def test_between_backward_and_step_gradients_norms_and_overflow_are_there(found):
    for seen in found["between"]:
        assert seen == {"gradients": True, "norms": True, "overflow": True}


def test_a_universal_checkpoint_loads(found):
    """Parameters look at their moments where these are, after the load and after the next step."""
    assert [claim for claim, holds in found["universal"].items() if not holds] == []


def test_zenflows_workers_find_stocks_op_beside_ours(found):
    assert found["zenflow"] == [True] * 3


def test_without_a_compiler_stocks_op_steps_to_stocks_bits(found):
    assert found["no compiler"] == {"op is ours": False, "stock's bits": True}


def test_where_ours_is_plain_torch_stocks_op_steps():
    assert harness.results(PLAIN_TORCH, environment={"DS_CPU_ADAM": "torch"}) == [[False, True]]


def test_another_accelerator_is_left_alone_with_one_warning():
    ((applied, own, (warning,)),) = harness.results(HEARD + ANOTHER_DEVICE)
    assert applied == [] and own
    assert "npu" in warning


def test_a_wrong_number_of_threads_is_said_when_the_patch_is_applied():
    wrong = {"DS_HOST_THREADS": "0"}
    (ended,) = harness.run("import deepspeed_lean; deepspeed_lean.apply()", environment=wrong)
    assert ended.code == 1
    assert "ValueError: DS_HOST_THREADS: expected" in ended.stderr.splitlines()[-1]
