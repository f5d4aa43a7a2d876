"""Overlap and host waits, read from traces that were written by hand."""

import sys

import pytest

from tests.unit.source_tree import ROOT

MAIN, OTHER = 1, 2


@pytest.fixture
def overlap(monkeypatch):
    """The module, which stands beside the scripts that use it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import trace_overlap

    yield trace_overlap
    del sys.modules["trace_overlap"]


def event(cat, name, start, end, thread=MAIN):
    return {"ph": "X", "cat": cat, "name": name, "ts": float(start), "dur": float(end - start), "tid": thread}


def test_a_transfer_is_hidden_while_a_kernel_or_the_host_optimizer_computes(overlap):
    events = [
        event("kernel", "gemm", 0, 10),
        event("kernel", "gemm", 5, 20),
        event("kernel", "ncclDevKernel_Reduce_Sum_bf16_RING_LL", 15, 25),
        event("kernel", "ncclDevKernel_Reduce_Sum_bf16_RING_LL", 30, 35),
        event("kernel", "ncclDevKernel_AllReduce_Sum_f64_RING_LL", 40, 42),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 18, 22),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 18, 22),
        event("user_annotation", overlap.TILE_SUBMITTED, 50, 51),
        event("user_annotation", overlap.TILE_SUBMITTED, 55, 56),
        event("user_annotation", overlap.TILE_COMPUTED, 60, 60),
        event("user_annotation", overlap.TILE_COMPUTED, 70, 70),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 62, 64),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 68, 74),
        event("kernel", "ncclDevKernel_AllGather_RING_LL", 65, 85),
        {"ph": "M", "name": "thread_name"},
    ]
    found = {kind: tuple(transfer) for kind, transfer in overlap.transfers(events).items()}
    assert found == {
        "reduce-scatter": (2, 15, 5),
        "all-reduce": (1, 2, 0),
        "download": (1, 4, 2),
        "upload": (2, 8, 4),
        "all-gather": (1, 20, 5),
    }


def test_only_the_training_threads_waits_count_each_in_its_part(overlap):
    events = [
        event("user_annotation", "backward", 0, 10),
        event("user_annotation", "step", 10, 30),
        event("cuda_runtime", "cudaStreamSynchronize", 2, 5),
        event("cuda_runtime", "cudaEventSynchronize", 12, 13),
        event("cuda_runtime", "cudaEventSynchronize", 14, 18),
        event("cuda_runtime", "cudaDeviceSynchronize", 31, 32),
        event("cuda_runtime", "cudaEventSynchronize", 3, 9, OTHER),
        event("cuda_runtime", "cudaLaunchKernel", 6, 9),
    ]
    assert [tuple(wait) for wait in overlap.host_waits(events)] == [
        ("cudaEventSynchronize", "step", 2, 5),
        ("cudaStreamSynchronize", "backward", 1, 3),
        ("cudaDeviceSynchronize", "", 1, 1),
    ]
