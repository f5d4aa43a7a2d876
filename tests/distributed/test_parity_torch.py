"""World 1 in fp32 against torch.optim itself: every parameter and moment after ten steps."""

import itertools

import pytest
import torch

from tests.distributed.harness import run_distributed
from tests.distributed.training import (
    STEPS,
    ExactModel,
    Setup,
    exact_grad,
    start,
    state_of,
    total_numel,
    train_exact,
)

PLACES = [(0, False), (1, False), (2, False), (1, True), (2, True)]
# Two roundings a step is what a differently ordered, equally careful implementation may differ by.
ULPS_A_STEP = 2
MODES = {
    "AdamW": (torch.optim.AdamW, {"type": "AdamW"}),
    "Adam": (torch.optim.Adam, {"type": "Adam", "adam_w_mode": False}),
}


def _real_row(step, numel):
    """One sample with real gradients of very different magnitudes, `[1, numel]`."""
    generator = torch.Generator().manual_seed(step)
    magnitudes = 10.0 ** torch.randint(-6, 3, (1, numel), generator=generator)
    return torch.randn((1, numel), generator=generator) * magnitudes


def _reference(cls, settings, grad_of_step):
    """torch's optimizer on one tensor a parameter, with the largest magnitude that each value had."""
    model = ExactModel()
    optimizer = cls(model.parameters(), foreach=False, **settings)
    largest = {}
    for step in range(STEPS):
        pieces = grad_of_step(step, total_numel(model)).split([param.numel() for param in model.parameters()])
        for param, piece in zip(model.parameters(), pieces, strict=True):
            param.grad = piece.view_as(param)
        optimizer.step()
        state = _torch_state(model, optimizer)
        largest = {
            name: torch.maximum(value.abs(), largest.get(name, value.abs())) for name, value in state.items()
        }
    return state, largest


def _torch_state(model, optimizer):
    state = {}
    for name, param in model.named_parameters():
        state[f"{name}.param"] = state[f"{name}.master"] = param.detach().clone()
        for key in ("exp_avg", "exp_avg_sq"):
            state[f"{name}.{key}"] = optimizer.state[param][key].clone()
    return state


def _train_in_every_place(optimizer):
    results = {}
    for (stage, offload), accumulation in itertools.product(PLACES, (1, 4)):
        engine = start(ExactModel(), Setup(stage, offload, accumulation, optimizer=optimizer))
        train_exact(engine)
        results[stage, offload, accumulation] = state_of(engine)
        engine.destroy()
    return results


def _train_on_real_rows_in_every_place(optimizer):
    results = {}
    for stage, offload in PLACES:
        engine = start(ExactModel(), Setup(stage, offload, optimizer=optimizer))
        for step in range(STEPS):
            # One sample and a factor of one: the gradient is the row itself, bit for bit.
            engine.backward(engine(_real_row(step, total_numel(engine.module))))
            engine.step()
        results[stage, offload] = state_of(engine)
        engine.destroy()
    return results


@pytest.mark.parametrize("gradients", ["exact", "real"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("mode", MODES)
def test_every_parameter_and_moment_is_within_2_ulp_a_step_of_torch(mode, weight_decay, gradients):
    cls, named = MODES[mode]
    settings = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": weight_decay}
    train, grad_of_step = {
        "exact": (_train_in_every_place, exact_grad),
        "real": (_train_on_real_rows_in_every_place, lambda step, numel: _real_row(step, numel)[0]),
    }[gradients]
    expected, largest = _reference(cls, settings, grad_of_step)
    params = {**settings, **{key: value for key, value in named.items() if key != "type"}}
    (results,) = run_distributed(1, train, {"type": named["type"], "params": params})
    for place, state in results.items():
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            # Rounding errors are as large as the values that were rounded, which may have been larger than
            # the last.
            ulp = torch.nextafter(largest[name], torch.tensor(torch.inf)) - largest[name]
            ulps = ((tensor - expected[name]).abs() / ulp).max().item()
            assert ulps <= ULPS_A_STEP * STEPS, f"{place}: {name} is {ulps:g} ulp off after {STEPS} steps"
