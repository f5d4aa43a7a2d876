"""A small byte-level GPT and the text that it learns from."""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

BYTE_VALUES = 256


@dataclass(frozen=True)
class GPTShape:
    """The model's shape; the default has 9.7 M parameters."""

    layers: int = 3
    heads: int = 8
    width: int = 512
    context: int = 64


class Block(nn.Module):
    """One transformer block: attention, then a multilayer perceptron, each behind a norm and a residual."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[batch, context, width]` to the same shape."""
        hidden = hidden + self.attention_out(self._attend(self.attention_norm(hidden)))
        return hidden + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(hidden)), approximate="tanh"))

    def _attend(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, context, width = hidden.shape
        qkv = self.qkv(hidden).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, context, width)


class GPT(nn.Module):
    """Predicts the next byte; `forward` returns the mean cross-entropy in nats.

    Args:
        shape: layers, heads, width and longest context.
    """

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTE_VALUES, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*[Block(shape) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTE_VALUES, bias=False)
        for name, param in self.named_parameters():
            if param.dim() > 1:
                # Each block adds two terms to the residual stream; smaller ones keep its variance.
                std = 0.02 / math.sqrt(2 * shape.layers) if name.endswith("_out.weight") else 0.02
                nn.init.normal_(param, std=std)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """`inputs` and `targets`: `[batch, context]` int64 byte values."""
        hidden = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        logits = self.head(self.norm(self.blocks(hidden)))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class ComputeInFloat(nn.Module):
    """Runs a bf16 module in fp32: weights and gradients stay bf16, what lies between is fp32.

    For processors without bf16 instructions, which multiply bf16 matrices ten and more times slower.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """What the module returns."""
        weights = {name: param.float() for name, param in self.inner.named_parameters()}
        return functional_call(self.inner, weights, inputs)


def has_bf16_instructions() -> bool:
    """Whether the processor multiplies bf16 matrices itself."""
    return "bf16" in Path("/proc/cpuinfo").read_text()


def standard_library_bytes() -> torch.Tensor:
    """The running Python's own modules as one text, `[n]` uint8.

    Raises:
        RuntimeError: this Python has no sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.py")))
    if not text:
        raise RuntimeError(
            f"stdlib: expected Python sources in {folder}, got none. Use a Python that has its sources."
        )
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


class Windows:
    """Random windows of a text.

    Args:
        text: `[n]` uint8.
        batch: windows a call.
        context: bytes of input in a window.
        seed: of the choice; different on every rank.
    """

    def __init__(self, text: torch.Tensor, batch: int, context: int, seed: int) -> None:
        self._text = text
        self._batch = batch
        self.context = context
        self._random = torch.Generator().manual_seed(seed)

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, each `[batch, context]` int64."""
        last = self._text.numel() - self.context - 1
        starts = torch.randint(last, (self._batch,), generator=self._random).tolist()
        rows = torch.stack([self._text[start : start + self.context + 1] for start in starts]).long()
        return rows[:, :-1], rows[:, 1:]
