"""Small engines for tests: a model whose gradient is its input, its configuration, and the log."""

import contextlib
import logging
from typing import NamedTuple

import torch

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param


class Weights(torch.nn.Module):
    """Parameters of given numels; the loss is their product with the input: the input is the gradient."""

    def __init__(self, *numels):
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.full((numel,), 1.0) for numel in numels])

    def forward(self, grad):
        flat = torch.cat([part.reshape(-1) for part in self.parts])
        return (flat * grad.to(flat)).sum()


class Case(NamedTuple):
    """One way to configure an engine."""

    stage: int
    offload: bool
    dtype: str  # fp32, bf16, fp16

    def config(self, **keys):
        return ds_config(self.stage, self.offload, self.dtype, **keys)


CASES = [
    Case(stage, offload, dtype)
    for stage, offload in ((0, False), (1, False), (1, True), (2, False), (2, True))
    for dtype in ("fp32", "bf16", "fp16")
]


def ds_config(stage=2, offload=True, dtype="fp32", **keys):
    """Plain Adam, no clipping, in fp16 a fixed loss scale; `keys` override the top level, None removes."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage},
    }
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    elif dtype == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 8.0}
    config.update(keys)
    return {key: value for key, value in config.items() if value is not None}


def make_engine(config, *numels, **arguments):
    """An engine over `Weights(*numels)`."""
    return deepspeed.initialize(model=Weights(*(numels or (16,))), config=config, **arguments)[0]


def run_micro_batch(engine, grad):
    """One forward, backward and step with a given gradient; returns the loss."""
    loss = engine(grad)
    engine.backward(loss)
    engine.step()
    return loss


def full_weights(engine):
    """The fp32 masters of all trainable parameters, flat, as a list. Collective."""
    masters = [safe_get_full_fp32_param(param) for param in engine.module.parameters() if param.requires_grad]
    return torch.cat([master.reshape(-1) for master in masters]).tolist()


@contextlib.contextmanager
def captured_log():
    """The messages that the package logs inside the block, on this rank, as a list that grows."""
    messages = []

    class Keep(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    handler, log = Keep(), logging.getLogger("DeepSpeed")
    log.addHandler(handler)
    try:
        yield messages
    finally:
        log.removeHandler(handler)
