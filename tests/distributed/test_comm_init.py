"""init_distributed makes a process group from any launcher and any client's call."""

import os
import socket
from datetime import timedelta

import pytest
import torch

import deepspeed.comm as dist
from tests.distributed.harness import run_distributed

LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def forget_launcher(**env):
    """Leave the environment of a plain shell, plus env; return the rank that this process had."""
    place = {name: os.environ.pop(name) for name in LAUNCH_VARIABLES}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    os.environ.update(env)
    return int(place["RANK"]), int(place["WORLD_SIZE"])


def summed_ranks():
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def plain_python(call):
    forget_launcher(MASTER_PORT="29500")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
        dist.init_distributed(**call)
        state = (
            dist.is_initialized(),
            dist.get_rank(),
            dist.get_world_size(),
            dist.get_backend(),
            summed_ranks(),
        )
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    return state, [os.environ[name] for name in names], dist.get_local_rank(), dist.get_all_ranks_from_group()


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"dist_backend": None, "auto_mpi_discovery": False},
        {"dist_backend": "nccl", "auto_mpi_discovery": False, "dist_init_required": True},
        {"dist_backend": "gloo", "timeout": timedelta(seconds=30), "distributed_port": 29517},
        {"timeout": 30, "init_method": "env://", "verbose": False},
        {"timeout": None, "rank": 0, "world_size": 1},
    ],
    ids=str,
)
def test_plain_python_is_a_world_of_one_even_when_the_port_is_taken(call):
    [(state, env, local_rank, ranks)] = run_distributed(1, plain_python, call, process_group=False)
    assert state == (True, 0, 1, "gloo", 0.0)
    assert (env, local_rank, ranks) == (["0", "0", "1"], 0, [0])


def under_torchrun(repeat):
    dist.init_distributed("gloo", distributed_port=1, timeout=timedelta(seconds=30))
    if repeat:
        dist.init_distributed(dist_backend="smoke", dist_init_required=True)
    return summed_ranks(), dist.get_world_size(), dist.get_local_rank()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_torchruns_world_is_joined(world):
    ranks = run_distributed(world, under_torchrun, False, process_group=False)
    assert ranks == [(sum(range(world)), world, rank) for rank in range(world)]


def test_a_second_call_changes_nothing():
    assert run_distributed(2, under_torchrun, True, process_group=False) == [(1.0, 2, 0), (1.0, 2, 1)]


def under_mpirun(port):
    rank, world = forget_launcher()
    names = {"RANK": rank, "SIZE": world, "LOCAL_RANK": rank, "LOCAL_SIZE": world}
    os.environ.update({f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()})
    dist.init_distributed(distributed_port=port)
    return summed_ranks(), dist.get_local_rank(), os.environ["LOCAL_WORLD_SIZE"]


def under_srun(port):
    rank, world = forget_launcher(SLURM_STEP_ID="0", SLURM_STEP_NODELIST="localhost", SLURM_NODEID="0")
    names = {"PROCID": rank, "LOCALID": rank, "STEP_NUM_TASKS": world, "STEP_TASKS_PER_NODE": world}
    os.environ.update({f"SLURM_{name}": str(value) for name, value in names.items()})
    dist.init_distributed(distributed_port=port)
    return summed_ranks(), dist.get_local_rank(), os.environ["LOCAL_WORLD_SIZE"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("launcher", [under_mpirun, under_srun])
def test_mpirun_and_srun_need_neither_mpi4py_nor_torchrun(launcher):
    ranks = run_distributed(2, launcher, free_port(), process_group=False)
    assert ranks == [(1.0, 0, "2"), (1.0, 1, "2")]


def by_arguments(url):
    rank, world = forget_launcher()
    dist.init_distributed("gloo", init_method=url, rank=rank, world_size=world)
    return summed_ranks()


def test_rank_and_world_size_may_be_arguments(tmp_path):
    assert run_distributed(2, by_arguments, f"file://{tmp_path}/store", process_group=False) == [1.0, 1.0]


def refused(env, call):
    forget_launcher(**env)
    try:
        dist.init_distributed(**call)
    except (ValueError, RuntimeError) as error:
        return type(error), str(error)
    return None


def test_a_taken_port_is_named_together_with_the_flag():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        [(kind, text)] = run_distributed(1, refused, env, {}, process_group=False)
    assert kind is RuntimeError
    assert text.startswith(f"MASTER_PORT: expected a free port on 127.0.0.1, got {port}, which is in use.")
    assert "--master_port" in text


@pytest.mark.parametrize(
    ("env", "call", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "MASTER_ADDR: expected the host of rank 0"),
        ({"WORLD_SIZE": "2"}, {}, "RANK: expected a number in the environment"),
        ({}, {"rank": 3, "world_size": 2}, "rank: expected less than the world size 2, got 3"),
        ({}, {"dist_backend": "smoke"}, "dist_backend: expected a backend that torch has here"),
    ],
)
def test_what_cannot_be_initialized_is_named_before_waiting_for_anyone(env, call, words):
    [(kind, text)] = run_distributed(1, refused, env, call, process_group=False, timeout_s=30)
    assert kind is ValueError
    assert words in text


def asks_for_nccl():
    import logging

    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("DeepSpeed").addHandler(handler)
    dist.init_distributed("nccl")
    return dist.get_backend(), [r.getMessage() for r in records if r.levelno == logging.WARNING]


def test_nccl_without_a_gpu_becomes_gloo_with_one_warning():
    [(backend, warnings)] = run_distributed(1, asks_for_nccl, process_group=False)
    assert backend == "gloo"
    assert warnings == ["dist_backend: nccl needs a GPU and there is none; using gloo."]


def world_group_calls():
    rank = dist.get_rank()
    one = dist.new_group([0])
    gathered = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(gathered, torch.tensor([float(rank)]))
    sent = torch.tensor([7.0 * (1 - rank)])
    dist.broadcast(sent, src=0)
    dist.barrier()
    members = dist.get_all_ranks_from_group(one) if rank == 0 else None
    return [t.item() for t in gathered], sent.item(), members, dist.get_world_group() is not None


def test_collectives_are_torchs_own():
    assert run_distributed(2, world_group_calls) == [
        ([0.0, 1.0], 7.0, [0], True),
        ([0.0, 1.0], 7.0, None, True),
    ]
