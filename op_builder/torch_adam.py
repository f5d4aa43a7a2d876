"""The host op in plain torch, for machines without a compiler: the same calls, several times slower.

Chosen by the user alone, with DS_CPU_ADAM=torch. Works a tile at a time, so temporaries stay small. Results
are within 2 units in the last place of the compiled op's, and sums within their own rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

_TILE_NUMEL = 1 << 18


def simd_level() -> str:
    """Returns "torch": no vector level of our own."""
    return "torch"


def adam_step(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    out: torch.Tensor | None,
    *hyper: Any,
) -> None:
    """One Adam step in place.

    Args:
        master: [numel] parameters.
        grad: [numel] gradient.
        exp_avg: [numel] first moment.
        exp_avg_sq: [numel] second moment.
        out: [numel] receives the new parameters in its own type, or None.
        hyper: step, lr, beta1, beta2, eps, weight_decay, adamw_mode, bias_correction, grad_scale and
            num_threads, which is torch's own number here.
    """
    step, lr, beta1, beta2, eps, weight_decay, adamw_mode, bias_correction, grad_scale, _ = hyper
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    flats = _flat(master=master, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    written = [flats[0], flats[2], flats[3]]
    if out is not None:
        written += _flat(master=master, out=out)[1:]
    for tile in _tiles(master.numel()):
        p, g, m, v = (flat[tile].float() for flat in flats)  # fp32 arrays are updated where they lie
        g = g * grad_scale
        if adamw_mode:
            p.mul_(1 - lr * weight_decay)
        else:
            g.add_(p, alpha=weight_decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        p.addcdiv_(m, v.sqrt().div_(math.sqrt(correction2)).add_(eps), value=-lr / correction1)
        for flat, value in zip(written, (p, m, v, p), strict=False):
            flat[tile].copy_(value)


def accumulate(dst: torch.Tensor, src: torch.Tensor, add: bool, num_threads: int) -> float:
    """dst = src or dst += src in fp32; returns the sum of squares of dst."""
    dst, src = _flat(dst=dst, src=src)
    for tile in _tiles(dst.numel()):
        value = src[tile].float()
        dst[tile].copy_(dst[tile].float() + value if add else value)
    return sum_of_squares(dst, num_threads)


def sum_of_squares(src: torch.Tensor, num_threads: int) -> float:
    """Sum of squares in double."""
    (src,) = _flat(src=src)
    return sum(float(src[tile].double().square_().sum()) for tile in _tiles(src.numel()))


def _tiles(numel: int) -> Iterator[slice]:
    return (slice(start, min(start + _TILE_NUMEL, numel)) for start in range(0, numel, _TILE_NUMEL))


def _flat(**tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns 1-D views, after the checks of the compiled op."""
    numel = next(iter(tensors.values())).numel()
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous CPU tensor, got {tuple(tensor.shape)} on {tensor.device}."
            )
        if tensor.numel() != numel:
            raise ValueError(
                f"{name}: expected {numel} elements, got {tensor.numel()}. Give tensors of one size."
            )
    return [tensor.detach().view(-1) for tensor in tensors.values()]
