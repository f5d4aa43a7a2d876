"""Starting the ranks of one host and watching them, on torch.distributed's elastic agent."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deepspeed.utils.logging import logger

__all__ = ["Job", "run_job"]

_LOCAL_RANK = "${local_rank}"  # the agent puts each rank's number here


@dataclass(frozen=True)
class Job:
    """What to run on this host.

    program: words before the script's arguments. log_dir: where each rank's output goes, None for the
        launcher's own.
    pass_local_rank: whether ``--local_rank=N`` comes before the script's arguments.
    """

    program: tuple[str, ...]
    script_args: tuple[str, ...]
    num_ranks: int
    master_addr: str
    master_port: int
    log_dir: str | None = None
    pass_local_rank: bool = True
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self, stamp: str) -> list[str]:
        """Return one rank's command.

        Args:
            stamp: Start of the names of log files.
        """
        local_rank = [f"--local_rank={_LOCAL_RANK}"] if self.pass_local_rank else []
        words = [*self.program, *local_rank, *self.script_args]
        if self.log_dir is None:
            return words
        log = f"{self.log_dir}/{stamp}_rank{_LOCAL_RANK}.log"
        return ["/bin/sh", "-c", 'exec "$@" >"$0" 2>&1', log, *words]

    def environment(self) -> dict[str, str]:
        """Return what every rank finds in its environment beside the agent's variables.

        Source: LOCAL_SIZE, CROSS_RANK and CROSS_SIZE as DeepSpeed sets them. OMP_NUM_THREADS shares the cores
        among
        the ranks unless the user set it: N ranks with a thread a core each are slower than with their share.
        """
        made = {"LOCAL_SIZE": str(self.num_ranks), "CROSS_RANK": "0", "CROSS_SIZE": "1", **self.env}
        if self.num_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
            made["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // self.num_ranks))
        return made


def run_job(job: Job) -> int:
    """Run a job to its end; when one rank fails, stop the others.

    Args:
        job: What to run.

    Returns:
        0, or the exit code of the rank that failed first; 128 + N if signal N ended it.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if job.log_dir is not None:
        Path(job.log_dir).mkdir(parents=True, exist_ok=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.num_ranks,
        run_id="deepspeed",
        rdzv_backend="static",
        rdzv_endpoint=f"{job.master_addr}:{job.master_port}",
        rdzv_configs={"rank": 0, "timeout": 900},
        max_restarts=0,
        start_method="spawn",
    )
    words = job.command(time.strftime("%Y%m%d%H%M%S"))
    logger.info("starting %d ranks of %s", job.num_ranks, " ".join(job.program))
    with _environment(job.environment()), _quiet_agent():
        try:
            elastic_launch(config, words[0])(*words[1:])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            logger.error("rank %d (pid %d) ended with exit code %d", rank, failure.pid, failure.exitcode)
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        except SignalException as error:
            return 128 + int(error.sigval)
    return 0


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables that the agent hands on to the ranks, and put back what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep the agent's warnings out of the job's output; its failures are reported by this module."""
    agent = logging.getLogger("torch.distributed.elastic")
    before = agent.level
    agent.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        agent.setLevel(before)
