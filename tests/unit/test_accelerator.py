"""get_accelerator() describes the device without initializing it."""

import mmap
import subprocess
import sys

import pytest
import torch

from deepspeed.accelerator import CpuAccelerator, get_accelerator


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    get_accelerator.cache_clear()
    yield get_accelerator()
    get_accelerator.cache_clear()


def test_the_cpu_is_a_device_of_its_own(cpu):
    assert isinstance(cpu, CpuAccelerator)
    assert (cpu.device_name(), cpu.device_name(3), cpu.current_device_name()) == ("cpu", "cpu", "cpu")
    assert (cpu.current_device(), cpu.device_count(), cpu.is_available()) == (0, 1, True)
    assert cpu.communication_backend_name() == "gloo"
    assert cpu.is_bf16_supported()
    assert cpu.supported_dtypes() == [torch.float32, torch.float16, torch.bfloat16]
    assert cpu.is_synchronized_device()


def test_calls_that_only_a_gpu_needs_do_nothing_on_the_cpu(cpu):
    cpu.synchronize()
    cpu.empty_cache()
    cpu.set_device(0)
    cpu.reset_peak_memory_stats()
    with cpu.device(0), cpu.stream(cpu.current_stream()):
        tensor = torch.ones(3)
    assert cpu.pin_memory(tensor) is tensor
    assert not cpu.is_pinned(tensor)
    assert cpu.on_accelerator(tensor)


def test_memory_of_the_cpu_is_that_of_this_process_within_the_machine(cpu):
    before = cpu.memory_allocated()
    # A mapping of its own: malloc may give out pages that the process already had.
    held = torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8).fill_(1)
    grown = cpu.memory_allocated() - before
    assert grown > 0.9 * held.nbytes, "64 MiB were touched; a tenth may have been given back elsewhere"
    assert cpu.memory_allocated() < cpu.total_memory()
    assert 0 < cpu.available_memory() <= cpu.total_memory()


def test_seed_makes_random_numbers_repeat(cpu):
    cpu.manual_seed(5)
    first = torch.rand(4)
    cpu.manual_seed_all(5)
    assert torch.equal(first, torch.rand(4))


def test_an_unknown_device_is_named(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "abacus")
    get_accelerator.cache_clear()
    with pytest.raises(
        ValueError, match="DS_ACCELERATOR: expected a device that torch has here, got 'abacus'"
    ):
        get_accelerator()
    get_accelerator.cache_clear()


def test_import_of_config_comm_and_accelerator_starts_nothing():
    code = (
        "import os, torch\n"
        "before, threads = dict(os.environ), torch.get_num_threads()\n"
        "import deepspeed.comm, deepspeed.accelerator, deepspeed.runtime.config\n"
        "assert dict(os.environ) == before\n"
        "assert torch.get_num_threads() == threads\n"
        "assert not torch.distributed.is_initialized()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
