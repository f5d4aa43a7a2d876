"""trl's SFTTrainer and DPOTrainer over a list of runs; each trains a small random Llama and reports on it.

A run is a dict: `name`; `kind`, "sft" or "dpo"; `deepspeed`, a configuration, or null for plain DDP; `lora`;
`reference`, what DPO compares with: "adapter" (the model without its adapter), "model" (a copy) or "before"
(values computed before training, by an engine of their own over the model that is trained later);
`arguments`, of TrainingArguments; and if wanted `resume`, the checkpoint to go on from.
"""

import copy
import os

os.environ["HF_HOME"] = os.path.abspath("hf")  # before the imports, which read it

import torch
import transformers.training_args
from accelerate import PartialState
from datasets import Dataset
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.deepspeed import HfDeepSpeedConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import deepspeed
from deepspeed import DeepSpeedEngine
from deepspeed.utils import safe_get_full_grad
from tests.clients.jobs.common import digest, read_task, report
from tests.clients.jobs.small_llama import choose_gloo, small_llama

# Trainer asks for a GPU that knows bf16 before it lets DeepSpeed use it; the CPU computes in bf16 as well.
transformers.training_args.is_torch_bf16_gpu_available = lambda: True

WORDS = 100


def make_tokenizer():
    """One token a word: w0, w1 and so on."""
    vocabulary = ["<unk>", "<pad>", "</s>", *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )


def words(start, step, first, last):
    """A piece of an arithmetic progression, which the model can learn to continue."""
    return " ".join(f"w{(start + step * index) % WORDS}" for index in range(first, last))


def make_dataset(kind, count=128):
    rows = []
    for index in range(count):
        start, step, length = 7 * index % WORDS, 1 + index % 3, 10 + index % 4
        if kind == "sft":
            rows.append({"text": words(start, step, 0, length)})
        else:
            chosen, rejected = words(start, step, 5, length), words(start + 50, step + 1, 5, length + 2)
            rows.append(
                {"prompt": words(start, step, 0, 5), "chosen": f" {chosen}", "rejected": f" {rejected}"}
            )
    # On disk, where trl's precomputed values are written beside it for all ranks.
    with PartialState().main_process_first():
        if not os.path.exists(f"data-{kind}"):
            Dataset.from_list(rows).save_to_disk(f"data-{kind}")
    return Dataset.load_from_disk(f"data-{kind}")


def make_trainer(run):
    """The trainer as a user makes it."""
    choose_gloo(run["deepspeed"] is not None)
    sft = run["kind"] == "sft"
    arguments = (SFTConfig if sft else DPOConfig)(
        output_dir=run["name"],
        deepspeed=run["deepspeed"],
        use_cpu=run["deepspeed"] is None,
        accelerator_config={"use_configured_state": True},
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=1,
        **({} if sft else {"beta": 0.5, "precompute_ref_log_probs": run["reference"] == "before"}),
        **run["arguments"],
    )
    more = {"peft_config": LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")} if run["lora"] else {}
    if run.get("reference") == "model":
        more["ref_model"] = small_llama()
    return (SFTTrainer if sft else DPOTrainer)(
        model=small_llama(),
        args=arguments,
        train_dataset=make_dataset(run["kind"]),
        processing_class=make_tokenizer(),
        **more,
    )


def what_became_of_the_adapter(trainer, folder):
    """Frozen weights are as they began, the adapter's files hold what was trained, and nothing else."""
    initial = small_llama().state_dict()
    model = trainer.model
    kept = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            begun = initial[name.removeprefix("base_model.model.").replace(".base_layer", "")]
            kept.append(torch.equal(param, begun.to(param.dtype)))
    trainer.save_model(folder)
    torch.distributed.barrier()
    saved = load_file(f"{folder}/adapter_model.safetensors")
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    reloaded = PeftModel.from_pretrained(small_llama(), folder, autocast_adapter_dtype=False)
    fresh = {name: reloaded.get_parameter(name).to(param.dtype) for name, param in trained.items()}
    return {
        "frozen_kept": len(kept) > 0 and all(kept),
        "saved": [len(saved), all("lora_" in name for name in saved)],
        "trained": len(trained),
        "reloads": digest(fresh) == digest(trained),
        "trained_numel": sum(param.numel() for param in trained.values()),
    }


def train(run):
    """One run to its end."""
    trainer = make_trainer(run)
    reference = trainer.ref_model if run["kind"] == "dpo" else None
    trainer.train(resume_from_checkpoint=run.get("resume"))
    engine = trainer.model_wrapped
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "class": type(engine).__name__,
        "loss": {entry["step"]: entry["loss"] for entry in log},
        "grad_norm": {entry["step"]: entry["grad_norm"] for entry in log},
        "margin": {entry["step"]: entry.get("rewards/margins") for entry in log},
        "weights": digest(trainer.model),
    }
    if isinstance(engine, DeepSpeedEngine):
        report = [entry for entry in engine.memory_report() if entry["owner"].startswith("Host")]
        result["buffers"] = {entry["name"]: entry["nbytes"] for entry in report}
    if isinstance(reference, DeepSpeedEngine):
        result["reference"] = [
            reference.zero_optimization_stage(),
            reference.optimizer,
            reference.memory_report(),
        ]
        initial = {name: value.to(torch.bfloat16) for name, value in small_llama().state_dict().items()}
        result["reference_kept"] = digest(reference.module) == digest(initial)
    if run["lora"] and not run.get("resume"):
        result["adapter"] = what_became_of_the_adapter(trainer, f"{run['name']}-adapter")
    return result


def adaptive_ranks():
    """peft's AdaLoRA asks this package for whole gradients, between backward and step."""
    choose_gloo(with_deepspeed=True)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    known = HfDeepSpeedConfig(dict(config))  # while it lives, peft knows that DeepSpeed trains
    adaptive = AdaLoraConfig(
        target_modules=["q_proj"], init_r=4, target_r=2, tinit=0, tfinal=1, deltaT=1, total_step=4
    )
    model = get_peft_model(small_llama(), adaptive)
    for name, param in model.named_parameters():
        if "lora_E" in name:
            param.data.fill_(0.1)  # peft begins at zero, where no other part has a gradient
    alone = copy.deepcopy(model)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    tokens = torch.arange(128).reshape(8, 16)
    for step in range(3):
        own = tokens[4 * torch.distributed.get_rank() :][:4]
        engine.backward(engine(input_ids=own, labels=own).loss)
        if step == 0:
            alone(input_ids=tokens, labels=tokens).loss.backward()
            expected = {name: param.grad for name, param in alone.named_parameters() if param.requires_grad}
            errors = [
                (safe_get_full_grad(model.get_parameter(name)) - grad).abs().max().item()
                for name, grad in expected.items()
            ]
        model.base_model.update_and_allocate(step)
        engine.step()
    scores = model.base_model.rankallocator.exp_avg_ipt
    del known
    return {
        "gradient_error": max(errors),
        "gradients": len(errors),
        "scored": sum(bool(score.abs().sum() > 0) for score in scores.values()),
        "scores": digest(scores),
    }


results = {"adaptive ranks": adaptive_ranks()}
for todo in read_task():
    results[todo["name"]] = train(todo)
    report(results)
