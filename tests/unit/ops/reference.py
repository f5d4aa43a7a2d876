"""Adam in float64, and inputs for it: what the kernel's results are held against."""

import math
from dataclasses import dataclass

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Relative spacing of each type's numbers.
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}

# Half the spacing below the least normal number, where the relative bound ends. fp32 flushes denormals whole.
DENORMAL = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-25}


@dataclass
class Settings:
    """Arguments of one step, in the order of the op."""

    step: int = 3
    lr: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.1
    adamw_mode: bool = True
    bias_correction: bool = True
    grad_scale: float = 0.5
    num_threads: int = 2

    def args(self):
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)


def make_inputs(numel, dtypes, offset=0, seed=0):
    """Returns master, grad, exp_avg, exp_avg_sq, each `offset` elements past an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(numel, generator=generator) for _ in range(3)]
    values.append(torch.rand(numel, generator=generator) + 0.01)
    tensors = []
    for value, dtype in zip(values, dtypes, strict=True):
        tensor = torch.zeros(numel + offset, dtype=dtype)[offset:]
        tensors.append(tensor.copy_(value))
    return tensors


def step_in_float64(master, grad, exp_avg, exp_avg_sq, s):
    """Returns parameter and moments after one step, computed in float64 from the given tensors."""
    p, g, m, v = (tensor.double() for tensor in (master, grad, exp_avg, exp_avg_sq))
    g = g * s.grad_scale
    if s.adamw_mode:
        p = p * (1 - s.lr * s.weight_decay)
    else:
        g = g + s.weight_decay * p
    m = s.beta1 * m + (1 - s.beta1) * g
    v = s.beta2 * v + (1 - s.beta2) * g * g
    correction1 = 1 - s.beta1**s.step if s.bias_correction else 1.0
    correction2 = 1 - s.beta2**s.step if s.bias_correction else 1.0
    p = p - s.lr / correction1 * m / (v.sqrt() / math.sqrt(correction2) + s.eps)
    return p, m, v


def assert_rounded(actual, expected, operands, name):
    """Checks a result of the kernel against its float64 value.

    The bound is half a spacing of the stored type (plus that of its denormals), and 8 fp32 roundings on the
    way: the formula has at most 7 that reach one result. Those count at the size of the operands, as
    subtraction may cancel.
    """
    bound = 0.5 * EPSILON[actual.dtype] * expected.abs() + DENORMAL[actual.dtype]
    bound += 8 * 0.5 * EPSILON[torch.float32] * sum(operand.double().abs() for operand in operands)
    excess = (actual.double() - expected).abs() - bound
    assert excess.numel() == 0 or excess.max().item() <= 0, f"{name}: {excess.max().item()} beyond the bound"
