"""What the measured jobs train.

Layers of one square weight each, residual, so that gradients keep an ordinary size.
"""

import torch

import deepspeed

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Block(torch.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.linear = torch.nn.Linear(hidden, hidden, bias=False)

    def forward(self, x):
        return x + 0.1 * self.linear(x)


class Data(torch.utils.data.Dataset):
    def __init__(self, hidden):
        self.hidden = hidden

    def __len__(self):
        return 1 << 30

    def __getitem__(self, index):
        return torch.full((self.hidden,), 1.0 + index % 7)


def make_model(job):
    """The model of a job."""
    torch.manual_seed(0)
    torch.set_default_dtype(DTYPES[job.model_dtype or job.dtype])
    model = torch.nn.Sequential(*[Block(job.hidden) for _ in range(job.layers)])
    torch.set_default_dtype(torch.float32)
    for block in list(model)[: job.frozen_layers]:
        block.requires_grad_(False)
    return model


def warm_up(job):
    """Code, thread stacks and library workspaces that any training needs come before the measurement."""
    block = Block(job.hidden).to(DTYPES[job.dtype])
    block(torch.ones(4, job.hidden, dtype=DTYPES[job.dtype])).float().square().mean().backward()


def config_of(job):
    """The configuration of a job."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": job.gas,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": job.stage,
            "reduce_bucket_size": 2_000_000,
            "allgather_bucket_size": 2_000_000,
            "offload_optimizer": {"device": "cpu", "pin_memory": job.pin},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
    }
    if job.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if job.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    config.update(job.extra)
    return config


def make_engine(job, model):
    """The engine of a job, over `job.groups` groups."""
    params = list(model.parameters())
    groups = [{"params": params[first :: job.groups]} for first in range(job.groups)]
    return deepspeed.initialize(model=model, model_parameters=groups, config=config_of(job))[0]


def start_workers(job):
    """Batches from forked workers; they live until the iterator is dropped."""
    loader = torch.utils.data.DataLoader(
        Data(job.hidden),
        batch_size=4,
        num_workers=job.workers,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    next(batches)
    return batches


def loss_of(engine, inputs):
    """The loss of one micro-batch."""
    dtype = next(engine.module.parameters()).dtype
    return engine(inputs.to(dtype)).float().square().mean()
