"""The engine as a module: what clients call, unwrap, patch and set on it."""

import inspect

import pytest
import torch

import deepspeed
from tests.small_engine import Weights, ds_config, make_engine, run_micro_batch

pytestmark = pytest.mark.usefixtures("world_of_one")

NUMEL = 12


class Talking(Weights):
    """A model with what large models have: an attribute, a method, a configuration of its own."""

    def __init__(self):
        super().__init__(NUMEL)
        self.vocabulary = 50
        self.config = {"hidden": NUMEL}
        self.register_buffer("table", torch.ones(3))

    def generate(self, times):
        return [self.vocabulary] * times


@pytest.fixture
def engine():
    return deepspeed.initialize(model=Talking(), config=ds_config())[0]


def test_it_is_a_module_over_the_users_own_model(engine):
    model = engine.module
    assert isinstance(engine, torch.nn.Module) and isinstance(model, Talking)
    assert list(engine.parameters()) == list(model.parameters())
    assert [name for name, _ in engine.named_parameters()] == ["module.parts.0"]
    assert set(engine.state_dict()) == {"module.parts.0", "module.table"}
    engine.eval()
    assert not model.training
    engine.train()
    assert model.training
    engine.requires_grad_(False)
    assert not model.parts[0].requires_grad


def test_what_the_engine_does_not_have_is_the_models(engine):
    assert engine.vocabulary == 50
    assert engine.generate(2) == [50, 50]
    assert engine.parts is engine.module.parts
    assert engine.config is not engine.module.config, "the engine's own come first"
    assert not hasattr(engine, "no_such_thing")


def test_clients_may_set_attributes(engine):
    engine._accelerator = "mine"
    engine.lr_scheduler = None
    assert engine._accelerator == "mine" and not hasattr(engine.module, "_accelerator")


def test_a_patched_forward_of_the_module_takes_effect(engine):
    """TRL and Lightning redirect forward to another method through the instance."""
    engine.module.forward = lambda grad: 3 * Talking.forward(engine.module, grad)
    assert engine(torch.ones(NUMEL)).item() == 3 * NUMEL
    run_micro_batch(engine, torch.ones(NUMEL))
    assert float(engine.get_global_grad_norm()) == pytest.approx(3 * NUMEL**0.5)


def test_keyword_arguments_and_containers_pass_through_forward():
    class Model(Weights):
        def forward(self, *, inputs):
            return {"loss": super().forward(inputs["grad"]), "note": "as it is"}

    engine = deepspeed.initialize(model=Model(NUMEL), config=ds_config())[0]
    output = engine(inputs={"grad": torch.ones(NUMEL)})
    assert output["note"] == "as it is"
    engine.backward(output["loss"])
    engine.step()
    assert engine.was_step_applied()


def test_backward_takes_clients_arguments_and_returns_the_loss():
    engine = make_engine(ds_config(gradient_accumulation_steps=4), NUMEL)
    loss = engine(torch.ones(NUMEL))
    assert engine.backward(loss, retain_graph=True).item() == NUMEL / 4
    assert engine.backward(loss, scale_wrt_gas=False).item() == NUMEL
    # One quarter of a pass and a whole one.
    engine.set_gradient_accumulation_boundary(is_boundary=True)
    engine.step()
    assert float(engine.get_global_grad_norm()) == pytest.approx(1.25 * NUMEL**0.5)


def test_step_counts_micro_batches_and_decides_the_boundary_itself():
    engine = make_engine(ds_config(gradient_accumulation_steps=3, train_micro_batch_size_per_gpu=2), NUMEL)
    seen = []
    for _ in range(6):
        run_micro_batch(engine, torch.ones(NUMEL))
        seen.append(
            (engine.micro_steps, engine.global_steps, engine.global_samples, engine.was_step_applied())
        )
    assert seen == [
        (1, 0, 0, False),
        (2, 0, 0, False),
        (3, 1, 6, True),
        (4, 1, 6, False),
        (5, 1, 6, False),
        (6, 2, 12, True),
    ]


def test_the_clients_boundary_overrides_the_count_until_it_says_otherwise():
    engine = make_engine(ds_config(), NUMEL)
    for is_boundary, steps in ((False, 0), (False, 0), (True, 1), (True, 2)):
        engine.set_gradient_accumulation_boundary(is_boundary=is_boundary)
        run_micro_batch(engine, torch.ones(NUMEL))
        assert engine.global_steps == steps


def test_readings_before_the_first_step():
    engine = make_engine(ds_config(dtype="bf16", gradient_clipping=0.5), NUMEL)
    assert engine.get_global_grad_norm() is None
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (0, 0, 0)
    assert not engine.was_step_applied() and not engine.optimizer.overflow
    assert engine.zero_optimization_stage() == 2
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (1, 1)
    assert engine.gradient_accumulation_steps() == 1 and engine.gradient_clipping() == 0.5
    assert engine.bfloat16_enabled() and not engine.fp16_enabled()
    assert engine.get_lr() == [0.1] and engine.cur_scale == 1.0
    assert engine.device.type == "cpu"


def test_signatures_that_clients_inspect():
    assert list(inspect.signature(deepspeed.initialize).parameters)[:6] == [
        "args",
        "model",
        "optimizer",
        "model_parameters",
        "training_data",
        "lr_scheduler",
    ]
    backward = inspect.signature(deepspeed.DeepSpeedEngine.backward).parameters
    assert {"loss", "retain_graph", "scale_wrt_gas"} <= set(backward)


def test_inference_leaves_no_graph_and_no_gradient(engine):
    with torch.no_grad():
        assert not engine(torch.ones(NUMEL)).requires_grad
    assert engine.module.parts[0].grad is None
