"""`offload_states` gives the device's memory back for a while, and training goes on bit for bit."""

import pytest
import torch

import deepspeed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH = 1024


def make_engine():
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
    }
    return deepspeed.initialize(model=torch.nn.Linear(WIDTH, WIDTH), config=config)[0]


def train(engine, steps):
    for step in range(steps):
        inputs = torch.linspace(-1, 1, WIDTH, device=engine.device, dtype=torch.bfloat16) * (step + 1)
        engine.backward(engine(inputs).float().square().mean())
        engine.step()


def test_states_moved_to_the_host_free_the_device_and_come_back_exactly():
    engine, reference = make_engine(), make_engine()
    train(engine, 2)
    train(reference, 2)
    before = torch.cuda.memory_allocated()
    engine.offload_states()
    states_nbytes = 16 * WIDTH * WIDTH  # fp32 master, gradient and two moments
    assert before - torch.cuda.memory_allocated() >= states_nbytes
    engine.reload_states()
    assert abs(torch.cuda.memory_allocated() - before) < states_nbytes / 16
    train(engine, 2)
    train(reference, 2)
    assert torch.equal(engine.module.weight, reference.module.weight)
