"""OpenRLHF's own strategy and trainers: supervised, and PPO's actor with several backward passes a step."""

import functools
import importlib
import math
import os
from unittest.mock import MagicMock

import torch
from tokenizers import Tokenizer, models
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, get_scheduler

import deepspeed
from tests.clients.jobs.common import digest, read_task, report
from tests.clients.jobs.openrlhf_on_cpu import TRAINING, allow_cpu, arguments

allow_cpu()
IMPORTED = [
    importlib.import_module(f"openrlhf.{name}").__name__
    for name in (
        "utils.deepspeed.deepspeed",
        "utils.deepspeed.deepspeed_utils",
        "models.model",
        "models.utils",
        "trainer.ray.ppo_actor",
    )
]
from openrlhf.models import Actor  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer  # noqa: E402
from openrlhf.trainer.sft_trainer import SFTTrainer  # noqa: E402
from openrlhf.utils import get_strategy  # noqa: E402
from openrlhf.utils.deepspeed import deepspeed_utils  # noqa: E402

VOCABULARY = 64
LENGTH = 12
SAMPLES = 32  # of all ranks: 4 optimizer steps


class PlainEngine(torch.nn.Module):
    """The same interface over torch's DDP, AdamW and clipping."""

    def __init__(self, module, groups, args):
        super().__init__()
        adam = TRAINING["adam"]
        self.ddp = DistributedDataParallel(module)
        self.optimizer = torch.optim.AdamW(groups, lr=adam["lr"], betas=adam["betas"], eps=adam["eps"])
        self.lr_scheduler = get_scheduler(
            TRAINING["lr_scheduler"],
            self.optimizer,
            num_warmup_steps=math.ceil(TRAINING["scheduler_steps"] * TRAINING["lr_warmup_ratio"]),
            num_training_steps=TRAINING["scheduler_steps"],
            scheduler_specific_kwargs={"min_lr_rate": TRAINING["min_lr_ratio"]},
        )
        ranks = torch.distributed.get_world_size()
        micro_batches = args.train.batch_size // args.train.micro_batch_size // ranks
        self.accumulation = 1 if args.train.dynamic_batch_enable else micro_batches
        self.micro_steps = self.global_steps = 0
        self.norm = None

    @property
    def module(self):
        return self.ddp.module

    def forward(self, *args, **kwargs):
        return self.ddp(*args, **kwargs)

    def backward(self, loss):
        (loss / self.accumulation).backward()

    def step(self):
        self.micro_steps += 1
        if self.micro_steps % self.accumulation:
            return
        self.norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), TRAINING["max_norm"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lr_scheduler.step()
        self.global_steps += 1

    def get_global_grad_norm(self):
        return self.norm


def prepare(strategy, actor, setting):
    """The actor, ready to train: by OpenRLHF's strategy, or on plain torch."""
    if setting["name"] != "plain":
        return strategy.prepare((actor, dict(TRAINING)))
    model, groups = strategy._get_model_parameters(actor, weight_decay=TRAINING["adam"]["weight_decay"])
    engine = PlainEngine(model, groups, strategy.args)
    actor.model = engine
    return actor, engine.optimizer, engine.lr_scheduler


def make_actor(setting):
    """An Actor of OpenRLHF over a small Llama with random weights."""
    folder = os.path.abspath("model")
    if torch.distributed.get_rank() == 0 and not os.path.exists(folder):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
        LlamaForCausalLM(config).save_pretrained(folder)
    torch.distributed.barrier()
    lora = {"lora_rank": 4, "target_modules": ["q_proj", "v_proj"]} if setting.get("lora") else {}
    actor = Actor(folder, attn_implementation="eager", param_dtype="bf16", **lora)
    return actor.float() if setting["dtype"] == "fp32" else actor


def make_strategy(setting, **more):
    strategy = get_strategy(arguments(setting, **more))
    strategy.setup_distributed()
    return strategy


def tokens(count):
    """Sequences that repeat with a period of 3, so that there is something to learn."""
    generator = torch.Generator().manual_seed(5)
    start = torch.randint(4, VOCABULARY, (count, 3), generator=generator)
    return start.repeat(1, LENGTH // 3)


class RecordingTrainer(SFTTrainer):
    """Keeps what OpenRLHF would log."""

    def save_logs_and_checkpoints(self, args, global_step, step_bar, logs_dict=None, client_states=None):
        self.logs = [*getattr(self, "logs", []), dict(logs_dict, step=global_step)]
        return super().save_logs_and_checkpoints(args, global_step, step_bar, logs_dict, client_states)


def supervised(setting, resume=False):
    """SFTTrainer.fit from the beginning, or from its checkpoint after two steps."""
    plain = setting["name"] == "plain"
    strategy = make_strategy(setting, path=os.path.abspath(f"{setting['name']}-ckpt"))
    actor, optimizer, scheduler = prepare(strategy, make_actor(setting), setting)
    ids = tokens(SAMPLES)
    data = [(row, torch.ones_like(row), torch.ones_like(row)) for row in ids]
    loader = strategy.setup_dataloader(data, strategy.micro_train_batch_size, shuffle=True)
    states = {"consumed_samples": 0}
    if resume:
        path, states = strategy.load_ckpt(actor.model, strategy.args.ckpt.path, tag="global_step2")
        assert path is not None
        strategy.args.ckpt.save_steps = -1
    trainer = RecordingTrainer(
        actor, strategy, optimizer, loader, None, scheduler, max_epochs=1, disable_ds_ckpt=plain
    )
    trainer.fit(strategy.args, states["consumed_samples"])
    return strategy, actor, trainer.logs


def what_comes_after(setting, strategy, actor, weights):
    """Export, evaluation engine, moving average, sleep."""
    wordlevel = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=wordlevel, unk_token="<unk>")
    folder = os.path.abspath(f"{setting['name']}-export")
    strategy.save_model(actor, tokenizer, folder)
    average = make_actor(setting)
    average._offload = True
    average = strategy.prepare(average)
    before = digest(average.model.module)
    for _ in range(strategy.accumulated_gradient):
        strategy.moving_average(actor.model, average.model, beta=0.5, device="cpu")
    deepspeed_utils.offload_deepspeed_states(actor.model)
    deepspeed_utils.reload_deepspeed_states(actor.model)
    with torch.no_grad():
        ids = tokens(2)
        logits = average(ids, attention_mask=torch.ones_like(ids), return_output=True)["logits"]
    result = {
        "averaged": digest(average.model.module) != before,
        "evaluation_optimizer": average.model.optimizer,
        "evaluation_is_finite": bool(logits.isfinite().all()),
    }
    if not setting.get("lora"):
        exported = LlamaForCausalLM.from_pretrained(folder, dtype="auto")
        result["exported"] = digest(exported) == weights
    return result


def policy(setting):
    """ActorPPOTrainer with dynamic batches: several backward passes of their own sizes before each step."""
    strategy = make_strategy(setting, dynamic=True)
    actor, optimizer, scheduler = prepare(strategy, make_actor(setting), setting)
    inference = MagicMock()  # vLLM's engine, to which fresh weights are sent
    trainer = ActorPPOTrainer(
        strategy, actor, None, optimizer, scheduler, 2, vllm_engines=[inference], dataloader_pin_memory=False
    )
    actor.eval()
    for row in tokens(8)[torch.distributed.get_rank() :: 2].repeat(2, 1):
        trainer.replay_buffer.append(experience(actor, row[None]))
    backward_passes = count_calls(strategy, "backward")
    status = trainer.ppo_train(0.1)
    trainer.broadcast_to_vllm()
    return {
        "loss": status["policy_loss"],
        "norm": status["actor_grad_norm"],
        "rate": status["actor_lr"],
        "steps": actor.model.global_steps,
        "backward_passes": len(backward_passes),
        "sent": [call.args[0] for call in inference.update_weight.remote.call_args_list],
        "names": [name for name, _ in actor.model.module.named_parameters()],
        "weights": actor.model.module.model.layers[1].mlp.down_proj.weight.flatten().tolist(),
    }


def experience(actor, ids):
    with torch.no_grad():
        mask = torch.ones_like(ids)
        actions = torch.ones(1, LENGTH - 4, dtype=torch.bool)
        old = actor(ids, actions, attention_mask=mask)
    return Experience(
        sequences=ids,
        attention_mask=mask,
        action_mask=actions,
        action_log_probs=old,
        base_action_log_probs=old - 0.1,
        rollout_log_probs=old,
        advantages=torch.linspace(-1, 2, LENGTH - 4)[None],
        total_length=torch.tensor([float(LENGTH)]),
        response_length=torch.tensor([float(LENGTH - 4)]),
        info={"reward": torch.ones(1)},
    )


def count_calls(owner, name):
    """Wrap a method; the list returned grows by one a call."""
    calls, method = [], getattr(owner, name)

    @functools.wraps(method)
    def counted(*args, **kwargs):
        calls.append(name)
        return method(*args, **kwargs)

    setattr(owner, name, counted)
    return calls


def check(setting):
    strategy, actor, logs = supervised(setting)
    if setting.get("lora"):
        before = dict(make_actor(setting).model.named_parameters())
        moved = [n for n, p in actor.model.module.named_parameters() if not torch.equal(p, before[n])]
    result = {"logs": logs, "engine": type(actor.model) is deepspeed.DeepSpeedEngine}
    if result["engine"]:
        weights = digest(actor.model.module)
        result |= what_comes_after(setting, strategy, actor, weights)
        _, resumed, resumed_logs = supervised(setting, resume=True)
        result["resumed_logs"] = resumed_logs
        result["resumes"] = digest(resumed.model.module) == weights
    if setting.get("lora"):
        result["trained_moved"] = [name for name in moved if "lora_" in name]
        result["frozen_moved"] = [name for name in moved if "lora_" not in name]
    else:
        result["policy"] = policy(setting)
    return result


report({"imported": IMPORTED, **{setting["name"]: check(setting) for setting in read_task()}})
