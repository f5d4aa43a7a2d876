"""transformers' Trainer over a list of runs: each trains a small random Llama and reports what it saw.

A run is a dict: `name`; `deepspeed`, a configuration, or null for plain DDP; `arguments`, of
TrainingArguments; and if wanted `folder`, for the checkpoints; `resume`, whether to continue from the last
one; `stop_after`, the step that ends the run as if by hand; `kill_after`, the step after which every rank is
killed, in the middle of the next; `memory_for`, the largest batch that does not run out of memory; `export`,
whether to write the model out and read it back.
"""

import math
import os
import signal

import torch
import transformers.training_args
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from deepspeed import DeepSpeedEngine
from tests.clients.jobs.common import digest, read_task, report
from tests.clients.jobs.small_llama import choose_gloo, small_llama, texts

# Trainer asks for a GPU that knows bf16 before it lets DeepSpeed use it; the CPU computes in bf16 as well.
transformers.training_args.is_torch_bf16_gpu_available = lambda: True


class Watch(TrainerCallback):
    """Records the weights after each step, and ends the run where the task says so."""

    def __init__(self, run):
        self.run = run
        self.weights = {}
        self.batch_sizes = []

    def on_step_end(self, args, state, control, model=None, **_):
        self.weights[state.global_step] = digest(model)
        if state.global_step == self.run.get("stop_after"):
            control.should_training_stop = True

    def on_step_begin(self, args, state, control, train_dataloader=None, **_):
        self.batch_sizes.append(train_dataloader.total_batch_size // args.world_size)
        if self.batch_sizes[-1] > self.run.get("memory_for", math.inf):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def on_substep_end(self, args, state, control, **_):
        if state.global_step == self.run.get("kill_after"):
            os.kill(os.getpid(), signal.SIGKILL)


def train(run):
    """One run to its end."""
    choose_gloo(run["deepspeed"] is not None)
    arguments = TrainingArguments(
        output_dir=run.get("folder", run["name"]),
        deepspeed=run["deepspeed"],
        use_cpu=run["deepspeed"] is None,
        accelerator_config={"use_configured_state": True},
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        seed=1,
        **run["arguments"],
    )
    watch = Watch(run)
    trainer = Trainer(
        model=small_llama(),
        args=arguments,
        train_dataset=texts(256, seed=2),
        eval_dataset=texts(16, seed=3),
        callbacks=[watch],
    )
    trainer.train(resume_from_checkpoint=run.get("resume"))
    engine = trainer.model_wrapped
    exported = None
    if run.get("export"):
        trainer.save_model("export")
        trainer.accelerator.wait_for_everyone()
        exported = digest(LlamaForCausalLM.from_pretrained("export"))
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "class": type(engine).__name__,
        "loss": {entry["step"]: entry["loss"] for entry in log},
        "grad_norm": {entry["step"]: entry["grad_norm"] for entry in log},
        "lr": {entry["step"]: entry["learning_rate"] for entry in log},
        "weights": watch.weights,
        "final": digest(trainer.model),
        "exported": exported,
        "eval": [trainer.evaluate()["eval_loss"], trainer.predict(texts(8, seed=3)).metrics["test_loss"]],
        "batch_sizes": watch.batch_sizes,
        "best": trainer.state.best_model_checkpoint,
        "buffers": engine.memory_report() if isinstance(engine, DeepSpeedEngine) else [],
    }


results = {}
for todo in read_task():
    results[todo["name"]] = train(todo)
    report(results)
