"""Each rank trains on the device of its local rank, as under stock, without a word in the script."""

from types import SimpleNamespace

import pytest

from deepspeed.runtime import engine_setup


class Devices:
    """An accelerator with some devices, which remembers the current one."""

    def __init__(self, count):
        self.count, self.current = count, 0

    def device_count(self):
        return self.count

    def set_device(self, index):
        self.current = index

    def current_device_name(self):
        return f"cuda:{self.current}"


@pytest.fixture
def place(monkeypatch):
    """Call training_device on a machine with devices and a launcher's variables."""

    def call(count, args=None, **env):
        devices = Devices(count)
        monkeypatch.setattr(engine_setup, "get_accelerator", lambda: devices)
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, str(value))
        device = engine_setup.training_device(args)
        assert device.index == devices.current
        return device.index

    return call


def test_it_is_that_of_the_local_rank(place):
    assert [place(4, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=4) for rank in range(4)] == [0, 1, 2, 3]
    assert place(4, {"local_rank": 2}, LOCAL_RANK=1) == 1, "OpenRLHF passes a dict, which says nothing new"


def test_it_is_what_the_arguments_name_as_lightning_does(place):
    assert place(4, SimpleNamespace(device_rank=3), LOCAL_RANK=0) == 3
    assert place(4, SimpleNamespace(device_rank=None), LOCAL_RANK=2) == 2


def test_it_is_the_current_one_without_a_launcher_and_the_only_one_if_there_is_one(place):
    assert place(4) == 0
    assert [place(1, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=2) for rank in range(2)] == [0, 0]


@pytest.mark.parametrize("rank", range(3))
def test_more_ranks_than_devices_are_refused_on_every_rank(place, rank):
    with pytest.raises(ValueError) as error:
        place(2, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=3)
    assert str(error.value) == (
        "LOCAL_RANK: expected at most 2 ranks on a machine with 2 devices, got 3. Start fewer (--num_gpus, "
        "--nproc_per_node), or let each rank see one (CUDA_VISIBLE_DEVICES)."
    )
