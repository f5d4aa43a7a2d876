"""One training job in a process of its own, measured from outside the allocators: /proc says what it costs.

`run_job(Job(...))` starts it, once for each rank, and returns each rank's growth in bytes over what the
process held when its model was there and nothing of the engine.
"""

import dataclasses
import gc
import json
import os
import sys
from pathlib import Path

from tests.memory.ranks import run_ranks

MIB = 2**20
LIMIT_S = 150


@dataclasses.dataclass(frozen=True)
class Job:
    """What to train. Every layer has hidden * hidden weights and nothing else."""

    layers: int = 32
    hidden: int = 1024
    dtype: str = "bf16"
    stage: int = 2
    gas: int = 1
    steps: int = 4
    groups: int = 1
    pin: bool = False
    workers: int = 0  # forked data-loader workers, alive to the end
    fork_at: str = "initialize"  # or step1: they are forked right after this phase
    frozen_layers: int = 0
    model_dtype: str = ""  # what the model is made in; by default `dtype`, so that `initialize` casts nothing
    extra: dict = dataclasses.field(default_factory=dict)  # top-level keys of the configuration

    @property
    def numel(self):
        """Weights of the model."""
        return self.layers * self.hidden**2

    @property
    def trainable_numel(self):
        """Weights that an optimizer sees."""
        return (self.layers - self.frozen_layers) * self.hidden**2


@dataclasses.dataclass(frozen=True)
class Phase:
    """Growth in bytes since before `initialize`."""

    rss: int  # this process
    tree: int  # PSS of this process and its descendants
    peak: int  # highest RSS within the phase


@dataclasses.dataclass(frozen=True)
class Result:
    """What one rank measured."""

    phases: dict  # name -> Phase
    ledger: list  # what the engine says that it holds: name, nbytes, pinned
    locked: int  # bytes that the kernel holds as locked or pinned for this process at the end

    def __getitem__(self, name):
        return self.phases[name]


def run_job(job, world=1):
    """Run a job on `world` ranks; returns one `Result` a rank."""
    lines = run_ranks("tests.memory.job", [json.dumps(dataclasses.asdict(job))], world, LIMIT_S)
    return [_parse(line) for line in lines]


def _parse(line):
    found = json.loads(line)
    phases = {name: Phase(**phase) for name, phase in found["phases"].items()}
    return Result(phases, found["ledger"], found["locked"])


# -- in the job's own process --------------------------------------------------------------------------------


def status_nbytes(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def tree_pss_nbytes():
    """PSS of this process and all its descendants; RSS cannot see pages that a fork made the parent copy.

    Without pages of files: these are code, shared with whatever else runs torch on this machine, so that a
    process's share of them moves with other processes.
    """
    children = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    todo, total = [os.getpid()], 0
    while todo:
        pid = todo.pop()
        todo += children.get(pid, [])
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        shares = [line for line in rollup if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
        assert len(shares) == 2, "a kernel that tells anonymous and file pages apart (5.9 or newer)"
        total += sum(int(line.split()[1]) * 1024 for line in shares)
    return total


def reset_peak():
    """VmHWM starts again from the present RSS."""
    Path("/proc/self/clear_refs").write_text("5")


class Meter:
    """Growth since it was made."""

    def __init__(self):
        gc.collect()
        self.phases = {}
        self._rss, self._tree = status_nbytes("VmRSS"), tree_pss_nbytes()
        reset_peak()

    def held_nbytes(self):
        """Growth in RSS now."""
        return status_nbytes("VmRSS") - self._rss

    def mark(self, name):
        """A phase ends here."""
        peak = status_nbytes("VmHWM")
        gc.collect()
        self.phases[name] = Phase(self.held_nbytes(), tree_pss_nbytes() - self._tree, peak - self._rss)
        reset_peak()


def _main(job):
    import torch

    import deepspeed
    from tests.memory import training

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = training.make_model(job)
    training.warm_up(job)
    meter = Meter()
    engine = training.make_engine(job, model)
    meter.mark("initialize")
    batches = None
    for step in range(1, job.steps + 1):
        if job.workers and batches is None and (job.fork_at == "initialize" or step > 1):
            batches = training.start_workers(job)
            meter.mark("workers")
        for _ in range(job.gas):
            inputs = next(batches) if batches is not None else torch.ones(4, job.hidden)
            engine.backward(training.loss_of(engine, inputs))
            if step == 1:
                meter.mark("backward1")
            engine.step()
        meter.mark(f"step{step}")
    found = {
        "phases": {name: dataclasses.asdict(phase) for name, phase in meter.phases.items()},
        "ledger": engine.memory_report(),
        "locked": status_nbytes("VmLck") + status_nbytes("VmPin"),
    }
    del batches
    print(json.dumps(found))


if __name__ == "__main__":
    _main(Job(**json.loads(sys.argv[1])))
