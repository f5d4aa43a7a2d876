"""Several GPUs of one host: the same numbers and decisions as one, the same checkpoints, one end for all.

Each claim runs on 2, 4 and 8 GPUs where they are, on 2 and 4 ranks that share one, and everywhere on 2 and 4
CPU ranks.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.distributed import test_checkpoint_resize as resize
from tests.distributed import test_forms as forms
from tests.distributed import test_overflow_skip as skip
from tests.distributed.harness import run_distributed
from tests.distributed.test_launcher import wait_until_gone
from tests.distributed.test_parity_grid import train_each
from tests.distributed.training import Setup, assert_same_bits
from tests.unit.source_tree import ROOT

START_S = 120.0  # eight processes import torch, build the op and make an NCCL communicator
END_S = 30.0  # from the end of one rank to the end of the job


def _gpus(count):
    missing = torch.cuda.device_count() < count
    return [pytest.mark.gpu, pytest.mark.skipif(missing, reason=f"CUDA devices needed: {count}")]


on_every_host = pytest.mark.parametrize(
    "device, world",
    [
        *(("cpu", count) for count in (2, 4)),
        *(pytest.param("cuda:0", count, marks=_gpus(1)) for count in (2, 4)),
        *(pytest.param("cuda", count, marks=_gpus(count)) for count in (2, 4, 8)),
    ],
)


def _same_on_all(results):
    assert all(repr(result) == repr(results[0]) for result in results), "ranks see different things"
    return results[0]


@on_every_host
def test_ten_steps_have_the_bits_of_one_rank_on_the_same_global_batch(device, world):
    plain = Setup(2, offload=True, dtype="bf16", clipping=0.5)
    # No more than 8 parts: the samples are shared out evenly.
    grid = [(accumulation, numel) for accumulation in sorted({1, 8 // world}) for numel in (7, 1 << 20)]
    setups = [plain.but(accumulation=accumulation, bucket_numel=numel) for accumulation, numel in grid]
    ((expected, expected_norm),) = run_distributed(1, train_each, [plain], device=device)[0]
    assert expected_norm > 0.5, "the norm is clipped"
    for results in run_distributed(world, train_each, setups, device=device):
        for setup, (state, norm) in zip(setups, results, strict=True):
            assert_same_bits(state, expected, setup)
            assert norm == expected_norm, setup


@on_every_host
def test_an_infinity_in_one_shard_skips_the_step_everywhere_and_all_clip_by_the_same_norm(device, world):
    keys = {"gradient_clipping": 0.5}
    facts = _same_on_all(run_distributed(world, skip.train_each, {1: float("inf")}, 3, keys, device=device))
    for case, (first, second, third) in zip(skip.CASES, facts, strict=True):
        assert [first.applied, second.applied, third.applied] == [True, False, True], case
        assert second.weights == first.weights != third.weights, case
        assert third.skipped == 1 and third.norm > 0.5, case


@on_every_host
def test_residual_masters_have_the_bits_of_fp32_masters(device, world):
    run_distributed(world, forms.residual_is_lossless, 2, device=device)


@on_every_host
def test_what_all_ranks_save_half_of_them_and_one_load(device, world, tmp_path):
    (saved, *others) = run_distributed(world, resize.save_one, str(tmp_path), device=device)
    for state in others:
        assert_same_bits(state, saved, "ranks hold the same")
    for fewer in sorted({1, world // 2}):
        for (state,) in run_distributed(fewer, resize.load_all, str(tmp_path), (world,), device=device):
            assert_same_bits(state, saved, f"{world} -> {fewer}")


KILLED = """
import os, pathlib, signal, sys
from tests.distributed.harness import share_one_gpu

if "cuda:0" in sys.argv:
    os.environ.update(share_one_gpu(int(os.environ["RANK"])))
import torch
import deepspeed

config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(64, 64), config=config)
assert (engine.device.type == "cpu") == ("cpu" in sys.argv), (engine.device, sys.argv)
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
pathlib.Path(str(rank)).write_text(str(os.getpid()))
while True:
    inputs = torch.ones(4, 64, device=engine.device, dtype=torch.bfloat16)
    loss = engine(inputs).float().square().mean()
    if rank == world - 1 and engine.global_steps == 3:
        pathlib.Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    engine.backward(loss)
    engine.step()
"""


@on_every_host
def test_a_rank_killed_in_the_middle_of_a_step_ends_the_job_with_its_exit_code(device, world, tmp_path):
    (tmp_path / "train.py").write_text(KILLED)
    # A launcher gives each rank a GPU, so that ranks which share one choose it themselves.
    launched = "cpu" if device == "cuda:0" else device
    with _start([*DEEPSPEED, "--num_gpus", str(world)], tmp_path, device, DS_ACCELERATOR=launched) as job:
        deadline = time.monotonic() + START_S
        while not (tmp_path / "killed").exists():
            assert job.poll() is None and time.monotonic() < deadline, _log(tmp_path)
            time.sleep(0.05)
        assert job.wait(timeout=END_S) == 128 + signal.SIGKILL, _log(tmp_path)
    assert all(wait_until_gone(int((tmp_path / str(rank)).read_text())) for rank in range(world))


ON_ITS_OWN_GPU = """
import torch
import deepspeed

engine, *_ = deepspeed.initialize(
    model=torch.nn.Linear(64, 64),
    config={"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}},
)
engine.backward(engine(torch.ones(4, 64, device=engine.device)).square().mean())
engine.step()
rank = torch.distributed.get_rank()
assert engine.device == torch.device("cuda", rank), engine.device
print(f"rank {rank} is done\\n", end="", flush=True)
"""
DEEPSPEED = ["-c", "from deepspeed.launcher.runner import main; main()", "--hostfile", "None"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2"]


@pytest.mark.parametrize("launcher", [TORCHRUN, DEEPSPEED], ids=["torchrun", "deepspeed"])
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_each_rank_trains_on_the_gpu_of_its_local_rank(launcher, tmp_path):
    (tmp_path / "train.py").write_text(ON_ITS_OWN_GPU)
    with _start(launcher, tmp_path, CUDA_VISIBLE_DEVICES="0,1") as job:
        assert job.wait(timeout=START_S) == 0, _log(tmp_path)
    assert "rank 0 is done" in _log(tmp_path) and "rank 1 is done" in _log(tmp_path)


def _start(launcher, folder, *arguments, **env):
    """`train.py` of a folder under a launcher, which leaves its output there."""
    command = [sys.executable, *launcher, "train.py", *arguments]
    with (folder / "log").open("w") as log:
        return _Job(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


class _Job(subprocess.Popen):
    """A launcher that does not outlive its block, and ends its ranks when it is told to end."""

    def __exit__(self, *error):
        self.terminate()
        super().__exit__(*error)


def _log(folder):
    return (folder / "log").read_text()[-4000:]
