"""What the tests of this folder rely on."""

import os
from pathlib import Path

import pytest

from tests.stock import harness

pytestmark = harness.MARKS

GATHER = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    report([dist.get_rank(), total.item()])
    dist.destroy_process_group()
    """
ONE_FAILS = """
    import os, sys, time
    if os.environ["RANK"] == "0":
        if os.fork() == 0:
            time.sleep(600)  # a worker that outlives its rank
        open("/dev/shm/deepspeed_allreduce_buffer_0_127.0.0.1_" + os.environ["MASTER_PORT"] + "_0", "w")
        sys.exit(3)
    report(os.getpgid(0))
    """


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_meet(world):
    assert harness.results(GATHER, world=world) == [[rank, world] for rank in range(world)]


def test_a_failed_rank_is_told_and_nothing_is_left():
    before = set(Path("/dev/shm").iterdir())
    failed, well = harness.run(ONE_FAILS, world=2)
    assert (failed.code, well.code) == (3, 0)
    with pytest.raises(ProcessLookupError):
        os.killpg(well.result, 0)
    assert not {path for path in set(Path("/dev/shm").iterdir()) - before if "allreduce" in path.name}
    with pytest.raises(AssertionError, match="rank 0 ended with 3"):
        harness.results(ONE_FAILS, world=2)


def test_a_program_that_hangs_fails_the_test():
    with pytest.raises(AssertionError, match=r"not done after 0\.5 s"):
        harness.run("import time; time.sleep(600)", timeout_s=0.5)


def test_the_interpreter_has_stock():
    (version,) = harness.results("import importlib.metadata as m; report(m.version('deepspeed'))")
    assert version.startswith("0.19.")
    assert "lean" not in version
