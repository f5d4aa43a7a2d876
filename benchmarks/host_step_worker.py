"""One process of host_step.py: holds the arrays of a family of contenders, and times a step whenever told to.

Reads the name of a contender a line, and answers the seconds that one step of it took. Runs under any
interpreter: stock's contender under that of a stock DeepSpeed, which must not see this repository.
"""

import argparse
import json
import time

import torch

SETTINGS = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
# Multiplies gradients in place again and again: any other factor would let them grow or vanish.
SCALE = 1.0


def make_arrays(numel, denormal, allocate=None):
    """Returns parameter, gradient and 16-bit output; `allocate(numel, dtype)` makes them, else torch."""
    allocate = allocate or (lambda numel, dtype: torch.empty(numel, dtype=dtype))
    generator = torch.Generator().manual_seed(0)
    grad = allocate(numel, torch.float32).normal_(generator=generator)
    if denormal:
        grad.mul_(1e-39)
    param = allocate(numel, torch.float32).normal_(generator=generator)
    return param, grad, allocate(numel, torch.bfloat16).zero_()


def lean(numel, denormal, threads):
    from deepspeed.runtime.zero.host_buffer import HostBuffer, Ledger
    from op_builder import CPUAdamBuilder

    op = CPUAdamBuilder().load()
    buffers = []

    def allocate(numel, dtype):
        """As the engine does it."""
        buffers.append(HostBuffer("benchmark", numel, dtype, Ledger()))
        return buffers[-1].tensor

    param, grad, out = make_arrays(numel, denormal, allocate)
    half_grad = allocate(numel, torch.bfloat16).copy_(grad)
    exp_avg, exp_avg_sq = (allocate(numel, torch.float32).zero_() for _ in range(2))
    beta1, beta2 = SETTINGS["betas"]
    rest = (
        10,
        SETTINGS["lr"],
        beta1,
        beta2,
        SETTINGS["eps"],
        SETTINGS["weight_decay"],
        True,
        True,
        SCALE,
        threads,
    )

    def step(gradient):
        op.adam_step(param, gradient, exp_avg, exp_avg_sq, out, *rest)

    def roof(gradient):
        op.roof(param, gradient, exp_avg, exp_avg_sq, out, threads)

    contenders = {
        "ours": lambda: step(grad),
        "roof": lambda: roof(grad),
        "ours, bf16 gradient": lambda: step(half_grad),
        "roof, bf16 gradient": lambda: roof(half_grad),
    }
    return contenders, {"simd_level": op.simd_level()}


def walk_three_times(make_optimizer, numel, denormal):
    """Returns a step as it is done without a fused op: unscale, Adam, cast."""
    values, grad, out = make_arrays(numel, denormal)
    param = torch.nn.Parameter(values)
    param.grad = grad
    optimizer = make_optimizer([param])

    def step():
        grad.mul_(SCALE)
        optimizer.step()
        out.copy_(param.detach())

    return step


def torch_fused(numel, denormal, threads):
    make = lambda params: torch.optim.AdamW(params, fused=True, **SETTINGS)  # noqa: E731
    return {"torch": walk_three_times(make, numel, denormal)}, {}


def stock(numel, denormal, threads):
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    make = lambda params: DeepSpeedCPUAdam(params, adamw_mode=True, **SETTINGS)  # noqa: E731
    return {"stock": walk_three_times(make, numel, denormal)}, {"stock_deepspeed": deepspeed.__version__}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("family", choices=["lean", "torch_fused", "stock"])
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--denormal", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    contenders, facts = globals()[options.family](options.numel, options.denormal, options.threads)
    for step in contenders.values():
        step()
    facts["torch"] = torch.__version__
    print("ready " + json.dumps({"contenders": list(contenders), "facts": facts}), flush=True)
    for line in iter(input, ""):
        # Once untimed: each contender starts from what it leaves itself, threads awake and caches its own.
        contenders[line]()
        start = time.perf_counter()
        contenders[line]()
        print(f"seconds {time.perf_counter() - start}", flush=True)


if __name__ == "__main__":
    main()
