"""What a larger model costs the host under Trainer: the engine's own account, and the machine's."""

import torch
import transformers.training_args
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.clients.jobs.common import read_task, report
from tests.clients.jobs.small_llama import choose_gloo, small_llama, texts
from tests.memory.job import Meter

# Trainer asks for a GPU that knows bf16 before it lets DeepSpeed use it; the CPU computes in bf16 as well.
transformers.training_args.is_torch_bf16_gpu_available = lambda: True

SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 8192}


class Mark(TrainerCallback):
    """Ends a phase of the measurement after each step."""

    def __init__(self, meter):
        self.meter = meter

    def on_step_end(self, args, state, control, **_):
        self.meter.mark(f"step{state.global_step}")


def measure(model, config, accumulation):
    """Train a few steps; growth in bytes over what the model alone held."""
    choose_gloo(with_deepspeed=True)
    arguments = TrainingArguments(
        output_dir="out",
        deepspeed=config,
        accelerator_config={"use_configured_state": True},
        bf16=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulation,
        max_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    meter = Meter()
    trainer = Trainer(model=model, args=arguments, train_dataset=texts(64, seed=2), callbacks=[Mark(meter)])
    trainer.train()
    result = {
        "growth": meter.phases["step4"].tree,
        "after step 1": meter.phases["step1"].tree,
        "buffers": trainer.model_wrapped.memory_report(),
        "numel": sum(parameter.numel() for parameter in model.parameters()),
    }
    trainer.accelerator.free_memory()
    trainer.model_wrapped.destroy()
    return result


llama = small_llama(**SIZES).to(torch.bfloat16)  # so that initialize casts nothing
llama(
    **{key: value[None] for key, value in texts(1, seed=2)[0].items()}
).loss.backward()  # libraries' workspaces
llama.zero_grad()
report({str(steps): measure(llama, read_task(), steps) for steps in (1, 2)})
