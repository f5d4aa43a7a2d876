"""Lightning's Fabric: plain DDP and each DeepSpeed setting, with a checkpoint in the middle of the run."""

import lightning as L
import torch

import deepspeed
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from tests.clients.jobs.common import digest, error_of, read_task, report
from tests.clients.jobs.lightning_on_cpu import MICRO_BATCH, allow_cpu, small_dataset, small_module

STEPS = 6
SAVED_AFTER = 3
ACCUMULATION = 2
CLIP = 0.5
RANKS = 2


class Run:
    """A model and its optimizer under one setting, trained as Fabric's guide writes it."""

    def __init__(self, setting):
        self.fabric = L.Fabric(
            accelerator="cpu", devices=RANKS, strategy=setting["strategy"], precision=setting["precision"]
        )
        self.fabric.launch()
        self.deepspeed = setting["strategy"] != "ddp"
        if self.deepspeed:
            self.fabric.strategy.config["gradient_clipping"] = CLIP
        with self.fabric.init_module():
            model = small_module()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        samples = MICRO_BATCH * ACCUMULATION * STEPS * RANKS
        loader = torch.utils.data.DataLoader(small_dataset(samples), batch_size=MICRO_BATCH)
        self.batches = list(self.fabric.setup_dataloaders(loader))
        self.losses = []

    def train(self, first, last):
        """Steps `first` to `last`, each of ACCUMULATION micro-batches."""
        for step in range(first, last):
            for inputs, labels in self.batches[step * ACCUMULATION : (step + 1) * ACCUMULATION]:
                loss = torch.nn.functional.cross_entropy(self.model(inputs), labels)
                self.losses.append(loss.item())
                self.fabric.backward(loss / ACCUMULATION)
            if not self.deepspeed:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
        return self.losses

    def state(self, **more):
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, **more}


def what_fabric_wraps(run):
    """Facts about the wrapper, whose class derives from the class of what it wraps."""
    wrapper, inner = run.optimizer, run.optimizer.optimizer
    return {
        "class": type(wrapper).__name__,
        "is_deepspeed": isinstance(wrapper, DeepSpeedOptimizer),
        "shares_groups": wrapper.param_groups is inner.param_groups,
        "rate_is_live": wrapper.param_groups[0]["lr"] == run.schedule.get_last_lr()[0],
        "shadows": sorted(set(vars(wrapper)) - {"_optimizer", "_strategy", "_callbacks"}),
        "norm": inner.grad_norm,
        "engine": type(run.model._forward_module) is deepspeed.DeepSpeedEngine,
        "reports": [
            entry["name"]
            for entry in run.model._forward_module.memory_report()
            if entry["owner"].startswith("Host")
        ],
    }


def check(setting):
    run = Run(setting)
    run.train(0, SAVED_AFTER)
    path = f"{setting['name']}.ckpt"
    run.fabric.save(path, run.state(step=SAVED_AFTER, words={"anything": "else"}))
    result = {"saved_weights": digest(run.model)}
    run.train(SAVED_AFTER, STEPS)
    result |= {"losses": run.losses, "weights": digest(run.model)}
    if run.deepspeed:
        result["wrapper"] = what_fabric_wraps(run)
        result["loads"] = loads(setting, path)
    return result


def loads(setting, path):
    """What becomes of the checkpoint in a fresh run that goes on from it, and in a model set up alone."""
    resumed = Run(setting)
    state = resumed.state(step=0, words={})
    resumed.fabric.load(path, state)
    resumed.train(state["step"], STEPS)
    with resumed.fabric.init_module(empty_init=True):
        frozen = small_module()
    frozen = resumed.fabric.setup(frozen)
    resumed.fabric.load(path, {"model": frozen})
    return {
        "losses": resumed.losses,
        "weights": digest(resumed.model),
        "words": state["words"],
        "alone": digest(frozen),
        "missing": error_of(lambda: resumed.fabric.load("nothing.ckpt", resumed.state())),
    }


allow_cpu()
report({setting["name"]: check(setting) for setting in read_task()})
