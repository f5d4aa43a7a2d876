"""The smallest job: an engine's world and device, by whichever launcher."""

import torch

import deepspeed
from tests.clients.jobs.common import read_task, report

model = torch.nn.Linear(4, 4)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
engine, *_ = deepspeed.initialize(model=model, config=config)
report({"task": read_task(), "batch": engine.train_batch_size(), "rank": torch.distributed.get_rank()})
