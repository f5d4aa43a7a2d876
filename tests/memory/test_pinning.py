"""Page-locked memory: none unless asked for, only the staging ring, and a refusal stops nothing.

CUDA is a stand-in here, which counts the bytes that it is asked to lock; tests/gpu does the same with a GPU.
"""

import pytest
import torch

from deepspeed.runtime.zero import host_buffer
from deepspeed.runtime.zero.host_buffer import HostBuffer, Ledger
from deepspeed.runtime.zero.ring import StagingRing
from deepspeed.runtime.zero.staging import SLOTS
from tests.small_engine import captured_log, ds_config, make_engine, run_micro_batch

SLOT_NBYTES = 3 * 4096 + 1


class Cuda:
    """Stands for the CUDA runtime: grants page locks, up to a limit of bytes."""

    def __init__(self, limit_nbytes=1 << 40):
        self.limit_nbytes = limit_nbytes
        self.locked = {}  # address -> bytes
        self.requests = []
        self.has_error = False

    def cudaHostRegister(self, address, nbytes, flags):
        self.requests.append(nbytes)
        if sum(self.locked.values()) + nbytes > self.limit_nbytes:
            self.has_error = True
            return 2
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0

    def forget_error(self):
        self.has_error = False


@pytest.fixture
def cuda(monkeypatch):
    """A machine whose CUDA runtime is the stand-in."""
    runtime = Cuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(host_buffer, "_forget_cuda_error", runtime.forget_error)
    return runtime


def test_without_pin_memory_not_one_byte_is_page_locked(cuda):
    ring = StagingRing(SLOT_NBYTES, False, Ledger(), SLOTS)
    assert not ring.pinned and cuda.requests == []
    ring.close()


def test_with_pin_memory_the_exact_bytes_of_the_ring_are_locked_and_unlocked_again(cuda):
    ledger = Ledger()
    ring = StagingRing(SLOT_NBYTES, True, ledger, SLOTS)
    assert ring.pinned and cuda.requests == [SLOT_NBYTES] * SLOTS, "nothing is rounded up"
    assert [entry.pinned for entry in ledger] == [True] * SLOTS
    ring.close()
    assert cuda.locked == {} and list(ledger) == []


@pytest.mark.parametrize("slots_granted", [0, 1, 2])
def test_a_refused_page_lock_warns_once_by_the_keys_name_and_goes_on(cuda, slots_granted):
    cuda.limit_nbytes = slots_granted * SLOT_NBYTES
    with captured_log() as log:
        ring = StagingRing(SLOT_NBYTES, True, Ledger(), SLOTS)
    assert not ring.pinned
    assert len(log) == 1
    assert log[0].startswith("zero_optimization.offload_optimizer.pin_memory: page-locking")
    assert "going on without" in log[0] and "memlock" in log[0]
    assert not cuda.has_error, "torch would raise it at its next kernel"
    ring.acquire().view(8, torch.float32).fill_(1.0)
    ring.close()
    assert cuda.locked == {}


def test_a_buffer_is_locked_once_and_unlocked_before_it_is_unmapped(cuda, monkeypatch):
    events = []
    unmap, unlock = host_buffer._unmap, cuda.cudaHostUnregister
    monkeypatch.setattr(host_buffer, "_unmap", lambda *args: (events.append("unmap"), unmap(*args)))
    cuda.cudaHostUnregister = lambda address: (events.append("unlock"), unlock(address))
    buffer = HostBuffer("staging", 4096, torch.uint8, Ledger())
    assert buffer.pin() and buffer.pin() and cuda.requests == [4096]
    del buffer
    assert events == ["unlock", "unmap"]


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("pin", [False, True])
def test_an_engine_without_gpu_page_locks_nothing_whatever_the_configuration(monkeypatch, pin):
    """Neither through the CUDA runtime nor through torch's own pinned allocator."""
    requests = []

    def locked(*args, **kwargs):
        requests.append(args)
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.cuda, "cudart", locked)
    monkeypatch.setattr(torch.Tensor, "pin_memory", locked)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": pin}}
    with captured_log() as log:
        engine = make_engine(ds_config(dtype="bf16", zero_optimization=zero), 12)
        for _ in range(3):
            run_micro_batch(engine, torch.ones(12))
    assert requests == [] and not [line for line in log if "pin_memory" in line]
    assert not any(entry["pinned"] for entry in engine.memory_report())
    engine.destroy()
