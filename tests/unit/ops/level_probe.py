"""Prints digests of the op's results over sizes, offsets, types and special values, as one JSON object.

Run by a test once for each vector level, in a process of its own: a process has one level.
"""

import hashlib
import itertools
import json
import sys

import torch

from deepspeed.ops.op_builder import CPUAdamBuilder
from tests.unit.ops.reference import FLOATS, Settings, make_inputs

SIZES = (0, 1, 7, 15, 16, 17, 33, 65, 1025)
LARGE = 600_011  # two threads, and stores past the cache
SPECIAL = (
    0.0,
    -0.0,
    1e-40,
    -1e-40,
    6e-8,
    65519.0,
    65520.0,
    3.4e38,
    float("inf"),
    float("-inf"),
    float("nan"),
)


def digest(*tensors):
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def probe_adam(op, results):
    cases = [*itertools.product(SIZES, FLOATS, FLOATS, FLOATS)]
    cases += [(LARGE, torch.float32, grad_type, torch.float32) for grad_type in FLOATS]
    for numel, master_type, grad_type, moment_type in cases:
        out_type = FLOATS[(numel + FLOATS.index(grad_type)) % 3]
        for offset, adamw_mode in ((0, True), (numel % 15 + 1, False)):
            tensors = make_inputs(numel, (master_type, grad_type, moment_type, moment_type), offset)
            tensors[1][: len(SPECIAL)] = torch.tensor(SPECIAL[:numel]).to(grad_type)
            out = torch.zeros(numel + offset, dtype=out_type)[offset:]
            op.adam_step(*tensors, out, *Settings(adamw_mode=adamw_mode).args())
            key = f"adam {numel} {master_type} {grad_type} {moment_type} {out_type} {offset} {adamw_mode}"
            results[key] = digest(*tensors, out)


def probe_accumulate(op, results):
    for numel, dst_type, src_type in itertools.product((*SIZES, LARGE), FLOATS, FLOATS):
        for offset, add in itertools.product((0, numel % 15 + 1), (True, False)):
            dst, src, _, _ = make_inputs(numel, (dst_type, src_type, src_type, src_type), offset)
            total = op.accumulate(dst, src, add, 2)
            results[f"accumulate {numel} {dst_type} {src_type} {offset} {add}"] = (total.hex(), digest(dst))
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    floats = (torch.arange(2**20, dtype=torch.int64) * 4099 - 2**31).to(torch.int32).view(torch.float32)
    for half_type in (torch.bfloat16, torch.float16):
        wide, narrow = torch.zeros(65536), torch.zeros(2**20, dtype=half_type)
        op.accumulate(wide, bits.view(half_type), False, 1)
        op.accumulate(narrow, floats, False, 1)
        results[f"widen {half_type}"], results[f"narrow {half_type}"] = digest(wide), digest(narrow)


def main():
    op = CPUAdamBuilder().load()
    results = {}
    probe_adam(op, results)
    probe_accumulate(op, results)
    json.dump({"level": op.simd_level(), "results": results}, sys.stdout)


if __name__ == "__main__":
    main()
