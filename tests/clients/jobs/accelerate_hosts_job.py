"""One step on each of two hosts under accelerate; leaves what a rank saw in out/<rank>."""

import json
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
model = torch.nn.Linear(4, 1, bias=False)
torch.nn.init.zeros_(model.weight)
rows = torch.tensor([[1.0] * 4, [2.0] * 4])
optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, torch.utils.data.DataLoader(rows, batch_size=1)
)
for row in loader:
    accelerator.backward(model(row).sum())
    optimizer.step()
seen = {
    "engine": type(model).__name__,
    "norm": float(model.get_global_grad_norm()),
    "ranks": [accelerator.process_index, accelerator.num_processes, int(os.environ["CROSS_RANK"])],
    "argv": sys.argv[1:],
}
with open(f"out/{accelerator.process_index}", "w") as file:
    json.dump(seen, file)
accelerator.end_training()
