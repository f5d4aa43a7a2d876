"""The memory printout speaks of its own process, whatever else the machine does."""

import subprocess
import sys

from tests.memory.job import MIB

SCRIPT = """
import sys
from deepspeed.utils.memory import memory_report
memory_report()
for line in sys.stdin:
    report = memory_report()
    print(report.rss_nbytes, report.peak_rss_nbytes, report.tree_pss_nbytes, flush=True)
"""


def test_memory_of_another_process_does_not_show():
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        before = _ask(child)
        block = bytearray(b"x" * (256 * MIB))
        after = _ask(child)
        assert len(block) == 256 * MIB
        child.stdin.close()
    for name in before:
        # The tree's share of library pages moves with other processes that map them: room of 64 MiB.
        assert abs(after[name] - before[name]) < 64 * MIB, name


def _ask(child):
    child.stdin.write("now\n")
    child.stdin.flush()
    values = map(int, child.stdout.readline().split())
    return dict(zip(("rss", "peak", "tree"), values, strict=True))
