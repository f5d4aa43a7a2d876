"""A random Llama of about 30 thousand parameters, and token sequences that it can learn."""

import os

import torch
from accelerate.state import AcceleratorState, PartialState
from transformers import LlamaConfig, LlamaForCausalLM


def small_llama(**changes):
    """The same parameters at every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 128, "max_position_embeddings": 32, **changes}
    return LlamaForCausalLM(LlamaConfig(**sizes))


def texts(count, seed):
    """Sequences of 16 tokens; each is an arithmetic progression."""
    starts, steps = torch.randint(0, 64, (2, count), generator=torch.Generator().manual_seed(seed))
    tokens = (starts[:, None] + (1 + steps[:, None] % 4) * torch.arange(16)) % 128
    return [{"input_ids": row, "labels": row} for row in tokens]


def choose_gloo(with_deepspeed):
    """Begin anew on gloo.

    Without a GPU accelerate takes DeepSpeed on several ranks only with a backend that is named beforehand.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(with_deepspeed).lower()
    PartialState(cpu=not with_deepspeed, backend="gloo")
