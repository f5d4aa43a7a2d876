"""The patch comes and goes; engines keep what they were made with; strange stock is left alone."""

import pytest

from tests.stock import harness

pytestmark = harness.MARKS


@pytest.fixture(scope="module")
def found():
    return harness.results(harness.JOBS / "lifecycle.py", environment=harness.LARGE_IS_MAPPED)[0]


def test_engines_keep_what_they_were_made_with(found):
    """Made before, under, after it, or under other switches; trained on across apply and revert."""
    assert [claim for claim, holds in found["on and off"].items() if not holds] == []


def test_two_engines_of_one_process_train_as_each_alone(found):
    assert found["two at once"]


def test_a_clients_optimizer_and_schedule_run_as_in_stock(found):
    """torch's AdamW, with zero_force_ds_cpu_optimizer off; StepLR counts the optimizer's steps itself."""
    seen = found["client"]
    assert seen["same bits"]
    assert seen["ours"] == seen["stock"]
    assert seen["ours"]["kind"] == "AdamW" and seen["ours"]["order"] == []
    assert seen["ours"]["calls"] == {"before": 30, "after": 30}  # 10 steps of 3 groups


def test_hooks_on_the_step_of_stocks_adam_run(found):
    assert found["client"]["calls of stock's Adam"] == {"before": 6, "after": 6}


def test_destroyed_engines_return_their_memory(found):
    """Measured: 0.2 to 0.4 bytes a parameter stay."""
    for held, left in found["returned"]:
        assert left < 1 < 17 < held


def test_stocks_cuda_accelerator_pins_exactly_what_is_asked_for(found):
    """As far as it goes without a device: switched on, replaced, and the memory is a host buffer."""
    assert found["pinned without a device"] == [True] * 4


STRANGE = """
    import logging
    import deepspeed, deepspeed_lean
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from deepspeed.runtime.zero import stage3, stage_1_and_2
    from deepspeed_lean.log import log

    class Heard(logging.Handler):
        def emit(self, record):
            if record.levelno >= logging.WARNING:
                lines.append(record.getMessage())

    def look():
        lines.clear()
        applied = deepspeed_lean.apply()
        assert applied == deepspeed_lean.applied()
        mixins = [base.__name__ for base in stage_1_and_2.DeepSpeedZeroOptimizer.__bases__]
        now = {"applied": applied, "warned": list(lines), "mixins": mixins}
        deepspeed_lean.revert()
        assert stage_1_and_2.DeepSpeedZeroOptimizer is own and deepspeed_lean.applied() == ()
        return now

    def changed(owner, name, value):
        before = vars(owner).get(name)
        setattr(owner, name, value) if value is not None else delattr(owner, name)
        try:
            return look()
        finally:
            setattr(owner, name, before) if before is not None else delattr(owner, name)

    lines, own, own3 = [], stage_1_and_2.DeepSpeedZeroOptimizer, stage3.DeepSpeedZeroOptimizer_Stage3
    log().addHandler(Heard())
    found = {"as it is": look()}
    for version in ("0.20.1", "0.18.9", "1.0.0"):
        found[version] = changed(deepspeed, "__version__", version)
    found["0.19.99"] = changed(deepspeed, "__version__", "0.19.99")

    def unscale_and_clip_grads(self, grads, norm):
        for grad in grads:
            grad.data.mul_(norm)

    def copy_grads_in_partition(self, param, group_idx=None):
        self.another_way(param)

    def temporaryless(self, *args, **kwargs):
        offload_optimizer_config = cpu_offload = cpu_offload_pin_memory = None

    def load(self):
        pass

    found["parameters"] = changed(own, "unscale_and_clip_grads", unscale_and_clip_grads)
    found["names"] = changed(own, "copy_grads_in_partition", copy_grads_in_partition)
    found["absent"] = changed(own, "get_grad_position", None)
    found["temporary"] = changed(own, "__init__", temporaryless)
    found["builder"] = changed(CPUAdamBuilder, "load", load)
    found["stage 3"] = changed(own3, "_setup_for_real_optimizer", None)
    report(found)
    """
ON_CPU = ["host_buffers", "adam_op", "unscale", "staging", "accumulator", "temporary"]


@pytest.fixture(scope="module")
def strange():
    return harness.results(STRANGE)[0]


@pytest.mark.parametrize("version", ["0.20.1", "0.18.9", "1.0.0"])
def test_another_release_is_left_alone_with_one_warning(strange, version):
    seen = strange[version]
    assert seen["applied"] == []
    assert seen["mixins"] == strange["0.18.9"]["mixins"] == ["ZeROOptimizer"]
    (warning,) = seen["warned"]
    assert version in warning and "0.19." in warning


def test_later_versions_of_the_release_are_taken_by_their_shape(strange):
    assert strange["0.19.99"] == strange["as it is"]
    assert strange["as it is"]["applied"] == ON_CPU and strange["as it is"]["warned"] == []


@pytest.mark.parametrize(
    "change, switch, place",
    [
        ("parameters", "unscale", "DeepSpeedZeroOptimizer.unscale_and_clip_grads"),
        ("names", "accumulator", "DeepSpeedZeroOptimizer.copy_grads_in_partition"),
        ("absent", "accumulator", "DeepSpeedZeroOptimizer.get_grad_position"),
        ("temporary", "temporary", "DeepSpeedZeroOptimizer.__init__"),
        ("builder", "adam_op", "CPUAdamBuilder.load"),
    ],
)
def test_a_part_of_another_shape_is_left_to_stock_alone(strange, change, switch, place):
    seen = strange[change]
    assert seen["applied"] == [name for name in ON_CPU if name != switch]
    (warning,) = seen["warned"]
    assert switch in warning and place in warning
    gone = set(strange["as it is"]["mixins"]) - set(seen["mixins"])
    assert len(gone) == (switch != "adam_op")


def test_stage_3_of_another_shape_is_named_and_stages_1_and_2_go_on(strange):
    """The switch stays in force for the stages that it fits."""
    seen = strange["stage 3"]
    assert seen["applied"] == ON_CPU
    (warning,) = seen["warned"]
    assert "DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer" in warning
