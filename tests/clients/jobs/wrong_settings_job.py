"""Wrong settings through accelerate and Trainer: what each rank is told, and whether a right one works after.

The task is a dict: name -> [client, configuration].
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from tests.clients.jobs.common import error_of, read_task, report
from tests.clients.jobs.small_llama import choose_gloo, small_llama, texts


def by_accelerate(config):
    """A model prepared for training with what the configuration lacks, and one step."""
    choose_gloo(with_deepspeed=True)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = small_llama()
    objects = [model, DataLoader(texts(16, seed=2), batch_size=4)]
    if "optimizer" not in config and "scheduler" not in config:
        objects.append(torch.optim.AdamW(model.parameters()))
    engine, loader, *_ = accelerator.prepare(*objects)
    accelerator.backward(engine(**next(iter(loader))).loss)
    accelerator.free_memory(engine)


def by_trainer(config):
    """One step."""
    choose_gloo(with_deepspeed=True)
    arguments = TrainingArguments(
        output_dir="out",
        deepspeed=config,
        accelerator_config={"use_configured_state": True},
        max_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    Trainer(model=small_llama(), args=arguments, train_dataset=texts(32, seed=2)).train()


clients = {"accelerate": by_accelerate, "Trainer": by_trainer}
report(
    {
        name: error_of(lambda client=client, config=config: clients[client](config))
        for name, (client, config) in read_task().items()
    }
)
