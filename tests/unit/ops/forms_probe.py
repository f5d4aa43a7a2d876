"""Steps in all smaller forms, on whatever vector level the environment asks for; writes what comes out."""

import sys

import torch

from op_builder import CPUAdamBuilder

from .reference import Settings

NUMEL = 20_011


def main():
    op = CPUAdamBuilder().load()
    results = {}
    for moments in ("bf16", "int8"):
        generator = torch.Generator().manual_seed(3)
        master = torch.randn(NUMEL, generator=generator)
        rest = torch.empty(NUMEL, dtype=torch.int16)
        weight = torch.empty(NUMEL, dtype=torch.bfloat16)
        ties = torch.zeros(-(-NUMEL // 16), dtype=torch.int16)
        op.split_master(master, rest, weight, ties)
        dtype = torch.bfloat16 if moments == "bf16" else torch.uint8
        state = [torch.zeros(NUMEL, dtype=dtype) for _ in range(2)]
        scales = [torch.zeros(-(-NUMEL // 256)) for _ in range(2)]
        for step in range(1, 6):
            grad = torch.randn(NUMEL, generator=generator)
            small = {"noise_key": step} if moments == "bf16" else {}
            if moments == "int8":
                small = {"exp_avg_scale": scales[0], "exp_avg_sq_scale": scales[1]}
            op.adam_step(rest, grad, *state, weight, *Settings(step=step).args(), ties=ties, **small)
        names = ("rest", "weight", "ties", "m", "v", "m_scale", "v_scale")
        tensors = (rest, weight, ties, *state, *scales)
        results.update({f"{moments} {name}": t for name, t in zip(names, tensors, strict=True)})
    torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
