"""What CUDA really does when it refuses a page lock."""

import pytest
import torch

from deepspeed.runtime.zero.host_buffer import HostBuffer, Ledger

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_refused_page_lock_leaves_no_error_for_the_next_kernel(caplog):
    buffer = HostBuffer("staging", 1 << 20, torch.uint8, Ledger()).fill_zero()
    address = buffer.tensor.data_ptr()
    # Locked already, by somebody else: CUDA refuses to do it twice.
    assert int(torch.cuda.cudart().cudaHostRegister(address, 1 << 20, 0)) == 0
    try:
        assert not buffer.pin()
        assert "page-locking" in caplog.text
        assert torch.ones(4, device="cuda").sum().item() == 4
    finally:
        torch.cuda.cudart().cudaHostUnregister(address)
    assert buffer.pin(), "and once it is free, it works"
    buffer.release()
