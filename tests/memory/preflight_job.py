"""A job whose `initialize` may be stopped for lack of memory; prints what it raised and what it had taken.

Arguments, as JSON: `limit_mib` of address space beyond what the process has, or `cgroup`, a folder that
stands for `/` when limits are looked up.
"""

import functools
import json
import resource
import sys
from pathlib import Path

import torch.distributed as dist

import deepspeed
from deepspeed.runtime.zero import preflight
from deepspeed.utils.host_limits import find_limits
from tests.memory import training
from tests.memory.job import MIB, Job, status_nbytes


def _main(limit_mib=0, cgroup="", world=1):
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    offload = {"stage": 2, "allgather_bucket_size": 100_000, "offload_optimizer": {"device": "cpu"}}
    job = Job(layers=16, gas=2, extra={"zero_optimization": {**offload, "reduce_bucket_size": 100_000}})
    model = training.make_model(job)
    dist.barrier()
    if cgroup:
        preflight.find_limits = functools.partial(find_limits, Path(cgroup))
    # Rank 1 alone is short: the others are stopped with it.
    if limit_mib and dist.get_rank() == world - 1:
        most = status_nbytes("VmSize") + limit_mib * MIB
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    before, words, engine = status_nbytes("VmRSS"), "", None
    try:
        engine = training.make_engine(job, model)
    except MemoryError as error:
        words = str(error)
    print(json.dumps({"words": words, "grown": status_nbytes("VmRSS") - before}))
    del engine
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(**json.loads(sys.argv[1]))
