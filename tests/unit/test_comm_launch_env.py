"""The place of a process is read from torchrun's, srun's and mpirun's variables, without their packages."""

from datetime import timedelta

import pytest

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.init import choose_backend, init_distributed
from deepspeed.comm.launch_env import LaunchEnv, first_host, read_launch_env, tasks_of_node

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29511",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NODELIST": "gpu[01-09]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}


def test_without_a_launcher_there_is_no_place():
    assert read_launch_env({}) is None
    assert read_launch_env({"LOCAL_RANK": "0", "MASTER_PORT": "29500", "WORLD_SIZE": "1"}) is None


def test_torchruns_variables_are_read():
    assert read_launch_env(TORCHRUN) == LaunchEnv("the environment", 3, 4, 1, 2, "node1", 29511)


def test_torchruns_variables_win_over_those_of_srun_around_it():
    assert read_launch_env(SRUN | OPENMPI | TORCHRUN).world_size == 4


def test_srun_places_the_step_not_the_allocation():
    assert read_launch_env(SRUN) == LaunchEnv("srun", 5, 6, 1, 2, "gpu07", None)


def test_python_inside_a_batch_script_of_many_tasks_is_a_world_of_one():
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_NODELIST": "gpu[01-02]"}
    assert read_launch_env(batch) is None


def test_mpirun_on_one_node_needs_no_master_address():
    assert read_launch_env(OPENMPI) == LaunchEnv("OpenMPI", 1, 2, 1, 2, "127.0.0.1", None)


def test_mpirun_on_two_nodes_leaves_the_master_address_open():
    assert read_launch_env(MPICH) == LaunchEnv("MPICH", 1, 2, 0, 1, None, None)
    assert read_launch_env(MPICH | {"MASTER_ADDR": "node1"}).master_addr == "node1"


@pytest.mark.parametrize("env", [SRUN, OPENMPI, MPICH])
def test_discovery_can_be_switched_off(env):
    assert read_launch_env(env, foreign=False) is None


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"WORLD_SIZE": "2"}, "RANK: expected a number in the environment beside WORLD_SIZE=2, got nothing"),
        ({"RANK": "0"}, "WORLD_SIZE: expected a number in the environment beside RANK=0, got nothing"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK: expected a number in the environment, got 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: expected 0 to 1, got 2"),
    ],
)
def test_an_incomplete_environment_names_the_variable(env, words):
    with pytest.raises(ValueError, match=words):
        read_launch_env(env)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu07", "gpu07"),
        ("gpu07,gpu09", "gpu07"),
        ("gpu[07-09]", "gpu07"),
        ("gpu[3,5-9],cpu1", "gpu3"),
        ("rack[01-02]-n4", "rack01-n4"),
        ("", None),
    ],
)
def test_first_host_of_a_slurm_node_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(("node", "tasks"), [(0, 4), (1, 4), (2, 1), (3, None)])
def test_tasks_of_each_node_of_a_slurm_layout(node, tasks):
    assert tasks_of_node("4(x2),1", node) == tasks


@pytest.mark.parametrize("name", [None, "gloo", "GLOO", "nccl", "cpu:gloo,cuda:nccl"])
def test_without_a_gpu_every_usual_backend_becomes_gloo(name, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    get_accelerator.cache_clear()
    assert choose_backend(name) == "gloo"
    get_accelerator.cache_clear()


def test_a_backend_that_torch_does_not_have_is_named():
    with pytest.raises(ValueError, match="dist_backend: expected a backend that torch has here, got 'smoke'"):
        choose_backend("smoke")


@pytest.mark.parametrize("timeout", [0, -1, "30", True, timedelta(0)])
def test_a_timeout_that_is_none_is_refused_before_anything_starts(timeout):
    with pytest.raises(ValueError, match="timeout: expected"):
        init_distributed(timeout=timeout)


def test_forbidden_initialization_says_what_is_missing():
    with pytest.raises(
        RuntimeError, match="dist_init_required: expected an initialized process group, got none"
    ):
        init_distributed(dist_init_required=False)
