"""accelerate over a list of runs: each trains a small random Llama, saves half-way, and goes on twice.

A run is a dict: `name`; `plugin`, arguments of DeepSpeedPlugin, null for plain DDP, or absent to take what
`accelerate launch` was told; `precision`; `dummy`, whether the optimizer is a DummyOptim; and `schedule`:
torch, config for a DummyScheduler, or callable for a DummyScheduler with a callable.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, InitProcessGroupKwargs
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from deepspeed import DeepSpeedEngine
from tests.clients.jobs.common import digest, read_task, report
from tests.clients.jobs.small_llama import choose_gloo, small_llama, texts

STEPS, SAVE_AFTER, ACCUMULATION, CLIP, LR = 8, 4, 2, 0.5, 3e-3


def make_accelerator(run):
    """The accelerator of a run, on gloo."""
    if "plugin" in run:
        choose_gloo(run["plugin"] is not None)
    plugin = DeepSpeedPlugin(**run["plugin"]) if run.get("plugin") else None
    return Accelerator(
        deepspeed_plugin=plugin,
        cpu=plugin is None and os.environ["ACCELERATE_USE_DEEPSPEED"] == "false",
        mixed_precision=run["precision"],
        gradient_accumulation_steps=ACCUMULATION,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )


def rise_and_fall(ticks_a_step):
    """A schedule of `ticks_a_step` ticks a step: half the rate, the rate, then down to nothing."""
    return lambda tick: min(tick / ticks_a_step + 1, 2, (STEPS - tick / ticks_a_step) / 3) / 2


def prepare(run, accelerator, model):
    """What a script makes and hands to accelerate."""
    loader = DataLoader(texts(128, seed=2), batch_size=4)
    if run.get("dummy"):
        optimizer = DummyOptim(model.parameters(), lr=LR, weight_decay=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    if run["schedule"] == "torch":
        # accelerate steps it once for each rank; the engine steps its own once.
        schedule = LambdaLR(optimizer, rise_and_fall(accelerator.num_processes))
    elif run["schedule"] == "callable":
        schedule = DummyScheduler(
            optimizer, lr_scheduler_callable=lambda optimizer: LambdaLR(optimizer, rise_and_fall(1))
        )
    else:
        schedule = DummyScheduler(optimizer, total_num_steps=STEPS * 2, warmup_num_steps=2)
    return accelerator.prepare(model, optimizer, loader, schedule)


def train(accelerator, model, optimizer, loader, schedule, first=0, save_to=None):
    """Steps `first` to the end of the data, one dict each."""
    steps = []
    total = torch.zeros(())
    for micro, batch in enumerate(accelerator.skip_first_batches(loader, first * ACCUMULATION)):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = (
                accelerator.clip_grad_norm_(model.parameters(), CLIP) if accelerator.sync_gradients else None
            )
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total += accelerator.reduce(loss.detach(), "mean") / ACCUMULATION
        if accelerator.sync_gradients:
            weights = digest(accelerator.unwrap_model(model))
            steps.append(
                {
                    "loss": total.item(),
                    "norm": float(norm),
                    "lr": schedule.get_last_lr()[0],
                    "weights": weights,
                }
            )
            total.zero_()
            if first + (micro + 1) // ACCUMULATION == SAVE_AFTER and save_to:
                accelerator.save_state(save_to)
        if first + (micro + 1) // ACCUMULATION == STEPS:
            break
    return steps


def do(run):
    """Train to the end, saving half-way; then again from there with a model of other weights."""
    accelerator = make_accelerator(run)
    objects = prepare(run, accelerator, small_llama())
    folder = os.path.join("states", run["name"])
    steps = train(accelerator, *objects, save_to=folder)
    engine = objects[0]
    exported = accelerator.get_state_dict(engine)
    bare = accelerator.unwrap_model(engine)
    result = {
        "class": type(engine).__name__,
        "steps": steps,
        "exported": digest(exported),
        "unwrapped": [type(bare).__name__, digest(bare)],
        "buffers": engine.memory_report() if isinstance(engine, DeepSpeedEngine) else [],
    }
    objects = accelerator.free_memory(*objects)
    if isinstance(engine, DeepSpeedEngine):
        result["after free_memory"] = engine.memory_report()
        other = small_llama()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
        objects = prepare(run, accelerator, other)
        accelerator.load_state(folder)
        result["again"] = train(accelerator, *objects, first=SAVE_AFTER)
        accelerator.free_memory(*objects)
    return result


results = {}
for todo in read_task():
    results[todo["name"]] = do(todo)
    report(results)
