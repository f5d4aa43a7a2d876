"""The number of threads: the user's word, else a fair share of the cores."""

import os

import pytest

from deepspeed.ops.adam import host_threads

# One of four tasks of a node that srun started with 6 cores for each; and torchrun's ranks under one task.
SLURM_TASK = {"SLURM_PROCID": "2", "RANK": "2", "LOCAL_WORLD_SIZE": "4", "SLURM_CPUS_PER_TASK": "6"}
TORCHRUN_IN_SLURM = {
    **SLURM_TASK,
    "SLURM_CPUS_PER_TASK": "12",
    "TORCHELASTIC_RUN_ID": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.mark.parametrize(
    ("environment", "cores", "expected"),
    [
        ({}, 16, 16),
        ({"LOCAL_WORLD_SIZE": "4"}, 16, 4),
        ({"LOCAL_WORLD_SIZE": "4"}, 3, 1),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}, 16, 4),  # torchrun's word, not the user's
        ({"LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}, 16, 1),
        ({"OMP_NUM_THREADS": "1"}, 16, 1),
        ({"OMP_NUM_THREADS": "6,2", "LOCAL_WORLD_SIZE": "4"}, 16, 6),
        ({"OMP_NUM_THREADS": "6", "DS_HOST_THREADS": "3"}, 16, 3),
        ({"DS_HOST_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, 16, 1),
        (SLURM_TASK, 6, 6),
        (SLURM_TASK, 24, 6),
        ({**SLURM_TASK, "DS_HOST_THREADS": "2"}, 24, 2),
        ({**SLURM_TASK, "SLURM_CPUS_PER_TASK": ""}, 24, 6),
        (TORCHRUN_IN_SLURM, 24, 6),
        ({**TORCHRUN_IN_SLURM, "SLURM_PROCID": "0"}, 24, 6),
    ],
)
def test_number_of_threads(environment, cores, expected, monkeypatch):
    for name in ("DS_HOST_THREADS", "OMP_NUM_THREADS", "RANK", *TORCHRUN_IN_SLURM):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert host_threads() == expected


@pytest.mark.parametrize("value", ["0", "-2", "many", "1.5"])
def test_number_that_is_none_is_an_error(value, monkeypatch):
    monkeypatch.setenv("DS_HOST_THREADS", value)
    with pytest.raises(ValueError, match="^DS_HOST_THREADS: expected a whole number of 1 or more"):
        host_threads()
