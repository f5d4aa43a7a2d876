"""What scripts do with accelerate beside one plain loop; launched by an accelerate configuration file."""

import copy
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from torch.utils.data import DataLoader

from tests.clients.jobs.common import digest, report
from tests.clients.jobs.small_llama import choose_gloo, small_llama, texts

OFFLOAD = {"zero_stage": 2, "offload_optimizer_device": "cpu", "gradient_clipping": 1.0}


def accelerator_with(**options):
    """A new accelerator on gloo, in bf16 unless told otherwise."""
    choose_gloo(with_deepspeed=True)
    options = {"mixed_precision": "bf16", **options}
    return Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], **options)


def train(accelerator, model, count=32):
    """Prepare a model and train on `count` sequences; returns the engine and the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(texts(count, seed=2), batch_size=4)
    )
    losses = []
    for batch in loader:
        loss = engine(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return engine, losses


def from_the_file():
    """What the launcher's configuration file asks for."""
    accelerator = accelerator_with()
    engine, losses = train(accelerator, small_llama())
    found = {name: engine.config[name] for name in ("gradient_clipping", "zero_optimization")}
    accelerator.free_memory(engine)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]  # the file's settings, which would reach the plugins of the others
    return {**found, "losses": losses, "bf16": engine.bfloat16_enabled()}


def teacher_and_student():
    """Two plugins: one engine trains, the other, of stage 0 and without an optimizer, only evaluates."""
    plugins = {"student": DeepSpeedPlugin(**OFFLOAD), "teacher": DeepSpeedPlugin(zero_stage=0)}
    plugins["teacher"].deepspeed_config["train_micro_batch_size_per_gpu"] = 4
    accelerator = accelerator_with(deepspeed_plugins=plugins)
    student = small_llama()
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    student, optimizer, loader = accelerator.prepare(
        student, optimizer, DataLoader(texts(64, seed=2), batch_size=4)
    )
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(small_llama()).eval()
    before = digest(teacher.module)
    accelerator.state.select_deepspeed_plugin("student")
    for batch in loader:
        with torch.no_grad():
            target = teacher(**batch).logits
        output = student(**batch)
        accelerator.backward(output.loss + (output.logits - target).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    same = [digest(teacher.module) == before, digest(student.module) == before]
    accelerator.free_memory(student, teacher)
    return {"teacher, student unchanged": same, "stages": [teacher.zero_optimization_stage(), 2]}


def skipped_steps():
    """fp16 from a loss scale that is too high: skipped steps leave a torch schedule where it is."""
    fp16 = {"enabled": True, "auto_cast": True, "initial_scale_power": 24, "hysteresis": 1}
    config = {"fp16": fp16, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    config |= {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = accelerator_with(deepspeed_plugin=plugin, mixed_precision="fp16")
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda tick: 1 / (1 + tick))
    loader = DataLoader(texts(128, seed=2), batch_size=4)
    engine, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    steps = []
    for batch in loader:
        rate = schedule.get_last_lr()[0]
        accelerator.backward(engine(**batch).loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        steps.append([accelerator.optimizer_step_was_skipped, rate != schedule.get_last_lr()[0]])
    skipped = engine.skipped_steps
    accelerator.free_memory(engine)
    return {"skipped, rate moved": steps, "count": skipped}


def the_same_model_twice():
    """A second engine over a model whose first engine still exists, against one over a copy."""
    model = small_llama()
    first, _ = train(accelerator_with(deepspeed_plugin=DeepSpeedPlugin(**OFFLOAD)), model)
    twin = copy.deepcopy(model)
    results = []
    for module in (model, twin):
        engine, losses = train(accelerator_with(deepspeed_plugin=DeepSpeedPlugin(**OFFLOAD)), module)
        results.append([digest(engine.module), losses])
        engine.destroy()
    first.destroy()
    return results


def evaluate_generate_and_compile():
    """An engine without an optimizer; and a compiled one, whose keys stay as they are."""
    accelerator = accelerator_with(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    model, loader = accelerator.prepare(small_llama(), DataLoader(texts(8, seed=2), batch_size=4))
    model.eval()
    loss = model(**next(iter(loader))).loss.item()
    tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).shape[1]
    options = {"deepspeed_plugin": DeepSpeedPlugin(**OFFLOAD), "dynamo_backend": "eager"}
    compiling = accelerator_with(**options)
    engine, losses = train(compiling, small_llama())
    keys = list(compiling.get_state_dict(engine))
    compiling.free_memory(engine)
    plain = list(small_llama().state_dict())
    return {"loss": loss, "tokens": tokens, "compiled": losses, "same keys": keys == plain}


habits = [
    from_the_file,
    teacher_and_student,
    skipped_steps,
    the_same_model_twice,
    evaluate_generate_and_compile,
]
report({habit.__name__: habit() for habit in habits})
