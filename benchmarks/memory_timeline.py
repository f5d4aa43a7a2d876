"""A process's memory over time, read from outside: a native call that holds the process's GIL cannot stop it.

RSS is read every 5 ms. The tree's proportional set size is read less often: the system walks all page tables
for it, which takes long in a large process. So that takes a fifth of the time of one core at most.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

from proc_memory import family_pss_nbytes, status_nbytes

INTERVAL_S = 0.005
PSS_SHARE = 0.2  # of the time, at most

Points = list[tuple[float, float]]  # seconds of the monotonic clock, and bytes or bytes a parameter


class Timeline:
    """Watches the calling process and its children from a child of its own, which is not counted.

    Stopped, that child stays until `close`, so that who counts it counts the same before and after.
    """

    def __init__(self) -> None:
        self._watcher = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(os.getpid())],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._watcher.stdout is not None
        self._watcher.stdout.readline()  # it watches

    def stop(self) -> dict[str, Points]:
        """Returns points of `rss` and `tree`."""
        return json.loads(self._say("stop"))

    def close(self) -> None:
        """Ends the child."""
        self._say("end")
        self._watcher.wait()

    def _say(self, word: str) -> str:
        # Not by closing the pipe: forked workers hold its end too.
        assert self._watcher.stdin is not None and self._watcher.stdout is not None
        self._watcher.stdin.write(word + "\n")
        self._watcher.stdin.flush()
        return self._watcher.stdout.readline()


def corners(points: Points) -> Points:
    """Returns the points without those in the middle of a level stretch."""
    inner = zip(points, points[1:], points[2:], strict=False)
    kept = [here for before, here, after in inner if not before[1] == here[1] == after[1]]
    return points[:1] + kept + points[-1:] if len(points) > 1 else points


def _watch_tree(pid: int, points: Points, stop: threading.Event) -> None:
    pause_s = 0.0
    while not stop.wait(max(INTERVAL_S, pause_s)):
        start = time.monotonic()
        nbytes = family_pss_nbytes(pid, but=os.getpid())
        end = time.monotonic()
        points.append(((start + end) / 2, nbytes))
        pause_s = (end - start) * (1 / PSS_SHARE - 1)


def _watch(pid: int) -> dict[str, Points]:
    """Samples until something is said on the standard input."""
    rss: Points = []
    tree: Points = []
    stop = threading.Event()
    thread = threading.Thread(target=_watch_tree, args=(pid, tree, stop), daemon=True)
    thread.start()
    while not select.select([sys.stdin], [], [], INTERVAL_S)[0]:
        rss.append((time.monotonic(), status_nbytes(pid, "VmRSS")))
    stop.set()
    thread.join()
    return {"rss": rss, "tree": tree}


if __name__ == "__main__":
    print("watching", flush=True)
    result = _watch(int(sys.argv[1]))
    sys.stdin.readline()
    print(json.dumps(result), flush=True)
    sys.stdin.readline()
