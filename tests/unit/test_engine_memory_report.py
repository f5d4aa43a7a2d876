"""The engine's account of its host buffers: names, and exactly the bytes that arithmetic says."""

import pytest
import torch

from tests.small_engine import captured_log, ds_config, make_engine, run_micro_batch

pytestmark = pytest.mark.usefixtures("world_of_one")

NUMELS = (1001, 7)
NUMEL = sum(NUMELS)


def state_nbytes(engine):
    """Bytes of each kind of buffer, gradient buckets left out: these do not grow with the model."""
    kinds = {}
    for entry in engine.memory_report():
        kind = entry["name"].split("[")[0]
        kinds[kind] = kinds.get(kind, 0) + entry["nbytes"]
    kinds.pop("bucket", None)
    return kinds


def a_kind(grad):
    return {"master": 4 * NUMEL, "gradient": grad * NUMEL, "exp_avg": 4 * NUMEL, "exp_avg_sq": 4 * NUMEL}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    "dtype, gas, grad", [("bf16", 1, 2), ("fp16", 1, 2), ("bf16", 2, 4), ("fp16", 2, 4), ("fp32", 1, 4)]
)
def test_14_or_16_bytes_a_parameter_from_initialize_to_destroy(stage, dtype, gas, grad):
    engine = make_engine(ds_config(stage=stage, dtype=dtype, gradient_accumulation_steps=gas), *NUMELS)
    assert state_nbytes(engine) == a_kind(grad)
    for _ in range(2 * gas):
        run_micro_batch(engine, torch.ones(NUMEL))
        assert state_nbytes(engine) == a_kind(grad)
    assert not any(entry["pinned"] for entry in engine.memory_report())
    engine.destroy()
    assert engine.memory_report() == []


def test_a_second_contribution_widens_the_gradient_once_and_says_so():
    engine = make_engine(ds_config(dtype="bf16"), *NUMELS)
    with captured_log() as log:
        for _ in range(2):
            for _ in range(2):
                engine.backward(engine(torch.ones(NUMEL)))
            engine.step()
    assert state_nbytes(engine) == a_kind(4)
    lines = [line for line in log if "widened" in line]
    assert len(lines) == 1 and f"+{2 * NUMEL} bytes" in lines[0]
    # Both passes count: 1 + 1 for each element.
    assert float(engine.get_global_grad_norm()) == pytest.approx(2 * NUMEL**0.5)
    run_micro_batch(engine, torch.ones(NUMEL))
    assert float(engine.get_global_grad_norm()) == pytest.approx(NUMEL**0.5), "and a single one after it"


def test_fp32_accumulation_asked_for_is_fp32_from_the_start():
    config = ds_config(dtype="bf16", data_types={"grad_accum_dtype": "fp32"})
    assert state_nbytes(make_engine(config, *NUMELS)) == a_kind(4)


def test_buffers_are_named_by_group():
    model_groups = [[0], [1]]
    import deepspeed
    from tests.small_engine import Weights

    model = Weights(*NUMELS)
    params = list(model.parameters())
    groups = [{"params": [params[index] for index in members]} for members in model_groups]
    engine = deepspeed.initialize(model=model, model_parameters=groups, config=ds_config())[0]
    report = {entry["name"]: entry["nbytes"] for entry in engine.memory_report()}
    for group, numel in enumerate(NUMELS):
        for name in ("master", "gradient", "exp_avg", "exp_avg_sq"):
            assert report[f"{name}[{group}]"] == 4 * numel


def test_without_offload_the_state_is_reported_where_the_device_holds_it():
    engine = make_engine(ds_config(offload=False), *NUMELS)
    run_micro_batch(engine, torch.ones(NUMEL))
    assert state_nbytes(engine) == a_kind(4)
    owners = {entry["name"]: entry["owner"] for entry in engine.memory_report()}
    assert owners["master[0]"] == owners["gradient[0]"] == "DeviceMaster"
    assert owners["exp_avg[0]"] == "optimizer" and owners["bucket"] == "BucketPool"


def test_state_that_a_foreign_optimizer_makes_by_itself_is_reported():
    config = ds_config(optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})
    engine = make_engine(config, *NUMELS)
    run_micro_batch(engine, torch.ones(NUMEL))
    assert state_nbytes(engine) == {"master": 4 * NUMEL, "gradient": 4 * NUMEL, "momentum_buffer": 4 * NUMEL}
