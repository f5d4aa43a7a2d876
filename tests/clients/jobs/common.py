"""What every job does: read its task, report what it saw."""

import hashlib
import json
import os
from pathlib import Path

import torch


def read_task():
    """The task that the test gave to `run_job`."""
    return json.loads(os.environ["CLIENT_TASK"])


def report(result):
    """Leave this rank's result, JSON, for the test. The last call counts."""
    path = Path(os.environ["CLIENT_REPORTS"], f"{int(os.environ['RANK']):03d}.json")
    path.with_suffix(".new").write_text(json.dumps(result))
    path.with_suffix(".new").rename(path)


def digest(module_or_tensors):
    """A hash of every tensor's name and bits: equal only if bitwise equal."""
    state = module_or_tensors.state_dict() if hasattr(module_or_tensors, "state_dict") else module_or_tensors
    total = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        flat = tensor.detach().cpu().contiguous().flatten()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def error_of(call):
    """The words of what a call raises, with its type's name in front; None if it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
