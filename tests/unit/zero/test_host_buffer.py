"""Host buffers: exact bytes, kept out of children, returned at once, counted."""

import gc
import os
import signal

import pytest
import torch

from deepspeed.runtime.zero.host_buffer import HostBuffer, Ledger


def resident_nbytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 7, 1000, 1001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widening_in_place_keeps_every_value(numel, dtype):
    buffer = HostBuffer("gradient", numel, dtype, Ledger(), torch.float32)
    values = torch.randn(numel).to(dtype)
    buffer.tensor.copy_(values)
    buffer.retype(torch.float32)
    assert torch.equal(buffer.tensor, values.float())
    assert buffer.nbytes == 4 * numel


def test_widening_without_reserved_space_is_refused_by_name():
    buffer = HostBuffer("gradient[0]", 8, torch.bfloat16, Ledger())
    with pytest.raises(RuntimeError, match=r"gradient\[0\]: expected a reserved dtype"):
        buffer.retype(torch.float32)


def test_reserved_space_costs_nothing_until_it_is_used():
    numel = 10_000_000
    before = resident_nbytes()
    buffer = HostBuffer("gradient", numel, torch.bfloat16, Ledger(), torch.float32).fill_zero()
    narrow = resident_nbytes() - before
    buffer.retype(torch.float32)
    wide = resident_nbytes() - before
    # A huge page at the border, and 1 MB that the interpreter may allocate meanwhile.
    assert abs(narrow - 2 * numel) < 3e6
    assert abs(wide - 4 * numel) < 3e6


def test_memory_goes_back_when_the_last_tensor_over_it_is_gone():
    ledger = Ledger()
    before = resident_nbytes()
    buffer = HostBuffer("master", 10_000_000, torch.float32, ledger).fill_zero()
    view = buffer.tensor[5:10]
    buffer.release()
    assert view.sum() == 0, "a view outlives release"
    assert resident_nbytes() - before > 39e6
    del view
    gc.collect()
    assert resident_nbytes() - before < 1e6
    assert list(ledger) == []


def test_a_forked_child_does_not_have_the_pages():
    buffer = HostBuffer("master", 1_000_000, torch.float32, Ledger()).fill_zero()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        buffer.tensor[0].item()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV, "touching it in a child is loud"


def test_a_forked_child_that_drops_a_buffer_unmaps_nothing_of_its_own():
    holder = [HostBuffer("master", 1_000_000, torch.float32, Ledger()).fill_zero()]
    address = holder[0].tensor.data_ptr()
    pid = os.fork()
    if pid == 0:
        import ctypes
        import mmap

        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        fixed = 0x10
        taken = libc.mmap(
            ctypes.c_void_p(address),
            ctypes.c_size_t(4096),
            3,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed,
            -1,
            0,
        )
        holder.clear()
        gc.collect()
        alive = ctypes.c_ubyte.from_address(taken).value == 0
        os._exit(0 if alive else 1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0


@pytest.mark.parametrize("groups", [1, 2, 8, 16, 30])
def test_equal_buffers_do_not_lie_alike(groups):
    """A cache that looks at low bits of addresses can tell the four of a group apart."""
    buffers = [HostBuffer("x", 1 << 20, torch.float32, Ledger()) for _ in range(4 * groups)]
    for group in range(groups):
        places = {buffer.tensor.data_ptr() % (512 << 10) for buffer in buffers[group::groups]}
        assert len(places) == 4
        assert all(place % 4096 == 0 for place in places)


def test_ledger_names_every_buffer_with_its_bytes():
    ledger = Ledger()
    first = HostBuffer("a", 3, torch.float32, ledger)
    second = HostBuffer("b", 5, torch.bfloat16, ledger, torch.float32)
    assert [(entry.name, entry.nbytes, entry.pinned) for entry in ledger] == [
        ("a", 12, False),
        ("b", 10, False),
    ]
    second.retype(torch.float32)
    assert ledger.total_nbytes == 32
    first.release()
    assert [entry.name for entry in ledger] == ["b"]


def test_pinning_without_a_gpu_is_a_no_op():
    buffer = HostBuffer("staging", 4096, torch.uint8, Ledger())
    if torch.cuda.is_available():
        pytest.skip("a GPU is there: see tests/gpu")
    assert buffer.pin() is False
    assert buffer.pinned is False


def test_more_memory_than_there_is_names_the_buffer():
    with pytest.raises(MemoryError, match=r"master\[3\]: expected \d+ bytes of host memory"):
        HostBuffer("master[3]", 1 << 50, torch.float32, Ledger())
