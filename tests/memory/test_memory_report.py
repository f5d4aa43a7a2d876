"""The memory report against allocations of known size, in a process of its own."""

import subprocess
import sys
import textwrap

MIB = 2**20


def run_script(body):
    script = textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rss_peak_and_tree_follow_what_is_allocated():
    # 64 MiB written; other memory of the interpreter moves by far less than the 8 MiB allowed.
    run_script("""
        from deepspeed.utils.memory import memory_report
        MIB = 2**20
        before = memory_report()
        block = bytearray(b"x" * (64 * MIB))
        held = memory_report()
        assert 56 * MIB < held.rss_nbytes - before.rss_nbytes < 72 * MIB, (before, held)
        assert 56 * MIB < held.tree_pss_nbytes - before.tree_pss_nbytes < 72 * MIB
        del block
        after = memory_report()
        assert after.rss_nbytes - before.rss_nbytes < 8 * MIB
        assert after.peak_rss_nbytes >= held.rss_nbytes
        assert after.machine_used_nbytes < after.machine_total_nbytes
    """)


def test_the_tree_counts_pages_that_a_fork_duplicated_and_rss_does_not():
    run_script("""
        import mmap, os
        from deepspeed.utils.memory import memory_report
        MIB = 2**20
        block = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block[:] = b"x" * (64 * MIB)
        go_read, go_write = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(go_read, 1)
            os._exit(0)
        shared = memory_report()
        for page in range(0, 64 * MIB, 4096):
            block[page] = 1
        copied = memory_report()
        os.write(go_write, b"1")
        os.waitpid(child, 0)
        assert 56 * MIB < copied.tree_pss_nbytes - shared.tree_pss_nbytes < 72 * MIB
        # Half of each shared page was the child's part; now it has 64 MiB for itself.
        assert shared.children == copied.children == 1
        assert 56 * MIB < copied.children_private_nbytes - shared.children_private_nbytes < 72 * MIB
        assert 28 * MIB < shared.children_shared_nbytes - copied.children_shared_nbytes < 36 * MIB
        assert abs(copied.rss_nbytes - shared.rss_nbytes) < 8 * MIB
    """)


def test_see_memory_usage_logs_the_process_and_the_machine_only_when_forced():
    out = run_script("""
        from deepspeed.utils import see_memory_usage
        see_memory_usage("not now")
        see_memory_usage("after step", force=True)
    """)
    assert "not now" not in out
    line = out.splitlines()[-1]
    assert "[Rank 0] after step: RSS " in line
    assert all(word in line for word in ("peak", "with children", "PSS", "machine"))
