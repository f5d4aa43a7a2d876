"""A small module and its data for Lightning, whose DeepSpeed strategies are let run on CPUs."""

import lightning.fabric.strategies.deepspeed as fabric_strategies
import lightning.pytorch.strategies.deepspeed as trainer_strategies
import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.strategies import DDPStrategy as TrainerDDP

FEATURES = 16
CLASSES = 4
MICRO_BATCH = 4


def allow_cpu():
    """Take out the two checks with which Lightning keeps DeepSpeed to CUDA, and nothing else.

    One asks for a CUDA accelerator before it goes on as DDP's strategy does. The other wants devices numbered
    by local rank, and CPUs have no number.
    """
    trainer_strategies.DeepSpeedStrategy.setup_environment = TrainerDDP.setup_environment
    fabric_strategies.DeepSpeedStrategy.setup_environment = FabricDDP.setup_environment
    for strategies in (trainer_strategies, fabric_strategies):
        strategies._validate_device_index_selection = lambda devices: None


def small_module():
    """A classifier whose weights depend on nothing but its seed, not on the default dtype either."""
    module = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 32),
        torch.nn.Tanh(),
        torch.nn.LayerNorm(32),
        torch.nn.Linear(32, CLASSES),
    )
    generator = torch.Generator().manual_seed(0)
    for layer in (module[0], module[3]):
        values = torch.empty(layer.weight.shape, dtype=torch.float32).uniform_(-0.2, 0.2, generator=generator)
        layer.weight.data.copy_(values)
        layer.bias.data.zero_()
    return module


def small_dataset(samples):
    """Labels that a random linear teacher gives."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float32)
    teacher = torch.randn(FEATURES, CLASSES, generator=generator, dtype=torch.float32)
    return torch.utils.data.TensorDataset(inputs, (inputs @ teacher).argmax(1))
