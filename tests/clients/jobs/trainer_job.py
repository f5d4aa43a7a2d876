"""transformers' Trainer over a list of runs: each trains a small random Llama and reports what it saw.

A run is a dict: `name`; `deepspeed`, a configuration or null for plain DDP; `arguments`, of TrainingArguments;
and if wanted `resume`, a checkpoint to continue from, `stop_after`, a step to stop behind as if done, and
`kill_after`, a step behind which every rank is killed in the middle of the next.
"""

import os
import signal

import torch
import transformers.training_args
from accelerate.state import AcceleratorState, PartialState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from deepspeed import DeepSpeedEngine
from tests.clients.jobs.common import digest, read_task, report

# Trainer asks for a GPU that knows bf16 before it lets DeepSpeed use it; the CPU computes in bf16 as well.
transformers.training_args.is_torch_bf16_gpu_available = lambda: True


def small_llama():
    """About 30 thousand parameters; the same ones in every run."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=32, **sizes))


def texts(count, seed):
    """Token sequences of 16 that can be learned: each is an arithmetic progression."""
    starts, steps = torch.randint(0, 64, (2, count), generator=torch.Generator().manual_seed(seed))
    tokens = (starts[:, None] + (1 + steps[:, None] % 4) * torch.arange(16)) % 128
    return [{"input_ids": row, "labels": row} for row in tokens]


class Watch(TrainerCallback):
    """Records the weights after each step, and ends the run where the task says so."""

    def __init__(self, run):
        self.run = run
        self.weights = {}
        self.buffers = None

    def on_step_end(self, args, state, control, model=None, **_):
        # Trainer hands over the bare module, which the engine and DDP train in place.
        self.weights[state.global_step] = digest(model)
        if state.global_step == self.run.get("stop_after"):
            control.should_training_stop = True

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.run.get("kill_after"):
            os.kill(os.getpid(), signal.SIGKILL)


def choose_gloo(with_deepspeed):
    """Two ranks without a GPU: accelerate takes DeepSpeed on gloo only from a state that is configured before."""
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(with_deepspeed).lower()
    PartialState(cpu=not with_deepspeed, backend="gloo")


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
        logging_nan_inf_filter=False,
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
    is_engine = isinstance(engine, DeepSpeedEngine)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "class": type(engine).__name__,
        "loss": {entry["step"]: entry["loss"] for entry in log},
        "grad_norm": {entry["step"]: entry["grad_norm"] for entry in log},
        "lr": {entry["step"]: entry["learning_rate"] for entry in log},
        "weights": watch.weights,
        "final": digest(trainer.model),
        "best": trainer.state.best_model_checkpoint,
        "ledger": engine.memory_report() if is_engine else [],
        "numel": sum(parameter.numel() for parameter in trainer.model.parameters()),
    }


results = {}
for todo in read_task():
    results[todo["name"]] = train(todo)
    report(results)
