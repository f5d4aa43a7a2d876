"""What scripts are used to: getters, a loader with a sampler, compile, the keys that divide gradients."""

import pytest
import torch

import deepspeed
from tests.small_engine import captured_log, ds_config, make_engine, run_micro_batch

pytestmark = pytest.mark.usefixtures("world_of_one")

GRAD = torch.linspace(-1, 1, 16)


def test_the_configuration_is_told_under_stocks_names():
    config = ds_config(
        dtype="fp16", gradient_accumulation_steps=2, steps_per_print=7,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    )  # fmt: skip
    engine = make_engine(config)
    assert engine.get_batch_info() == (2, 1, 2)
    assert (engine.zero_optimization(), engine.zero_use_cpu_optimizer()) == (True, True)
    assert engine.zero_offload_optimizer().device == "cpu"
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("AdamW", "WarmupLR")
    assert (engine.steps_per_print(), engine.dynamic_loss_scale()) == (7, False)
    assert [tuple(betas) for betas in engine.get_mom()] == [(0.9, 0.999)]
    assert not engine.zero_gather_16bit_weights_on_model_save()
    assert not engine.dump_state() and not engine.wall_clock_breakdown()
    engine.empty_partition_cache()


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("set_train_batch_size", (8,)),
        ("set_train_micro_batch_size", (8,)),
        ("_zero3_consolidated_16bit_state_dict", ()),
        ("_consolidated_16bit_state_dict", ()),
    ],
)
def test_calls_of_other_stages_say_what_to_do(call, arguments):
    engine = make_engine(ds_config())
    with pytest.raises(NotImplementedError, match=rf"{call}: expected a feature of this package, .*\. \w"):
        getattr(engine, call)(*arguments)


def test_a_compiled_module_trains_alike_under_the_same_names():
    plain, compiled = make_engine(ds_config()), make_engine(ds_config())
    names = list(plain.module.state_dict())
    compiled.compile(backend="eager", compile_kwargs={"fullgraph": True})
    assert compiled.is_compiled and not plain.is_compiled
    for engine in (plain, compiled):
        for _ in range(2):
            run_micro_batch(engine, GRAD)
    assert list(compiled.module.state_dict()) == names == list(compiled.module_state_dict())
    assert torch.equal(plain.module.parts[0], compiled.module.parts[0])
    with pytest.raises(
        NotImplementedError, match="compile: expected a feature of this package, got DeepCompile"
    ):
        compiled.compile(schedule=[])


def test_the_loader_takes_a_sampler_a_collate_function_and_drops_the_rest():
    data = [torch.full((2,), float(index)) for index in range(5)]
    engine = make_engine(ds_config(train_micro_batch_size_per_gpu=2, dataloader_drop_last=True))
    loader = engine.deepspeed_io(
        data, data_sampler=[4, 2, 0, 1, 3], collate_fn=lambda items: torch.stack(items) + 1
    )
    assert [batch[:, 0].tolist() for batch in loader] == [[5.0, 3.0], [1.0, 2.0]]
    assert loader.data_sampler == [4, 2, 0, 1, 3]
    config = ds_config(train_micro_batch_size_per_gpu=2)
    loader = deepspeed.initialize(
        model=torch.nn.Linear(2, 1), config=config, training_data=data, collate_fn=torch.stack
    )[2]
    batches = list(loader)
    assert sorted(torch.cat(batches)[:, 0].tolist()) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [len(batch) for batch in batches] == [2, 2, 1]


def test_any_prescale_setting_trains_alike_and_without_a_notice():
    weights = []
    for keys in ({}, {"prescale_gradients": True}, {"gradient_predivide_factor": 4.0}):
        with captured_log() as log:
            engine = make_engine(ds_config(**keys))
        assert not [line for line in log if "scale" in line or "predivide" in line]
        run_micro_batch(engine, GRAD)
        weights.append(engine.module.parts[0].detach().clone())
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
