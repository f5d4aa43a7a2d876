"""Starting the ranks of one host and watching them, on torch.distributed's elastic agent."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from deepspeed.launcher.job import Job
from deepspeed.launcher.watch import HostWatch
from deepspeed.utils.logging import logger

__all__ = ["Job", "run_job"]

_MEET_S = 900  # how long the hosts wait for one another


def run_job(job: Job) -> int:
    """Run this host's part of a job to its end; when one rank of any host fails, stop the others.

    Args:
        job: What to run.

    Returns:
        0, or the exit code of the rank that failed first; 128 + N if signal N ended it.
    """
    if job.log_dir is not None:
        Path(job.log_dir).mkdir(parents=True, exist_ok=True)
    logger.info("starting %d ranks of %s", job.num_ranks, " ".join(job.program))
    try:
        return _run_agent(job) if job.num_nodes == 1 else _run_watched(job)
    except DistError as error:
        logger.error(
            "--master_addr, --master_port: expected %d hosts to meet at %s:%d, got %s. Start the command on "
            "every host, and choose an address and a port that all of them reach.",
            job.num_nodes, job.master_addr, job.master_port, str(error).partition("\n")[0],
        )  # fmt: skip
        return 1


def _run_watched(job: Job) -> int:
    watch = HostWatch(job)
    watch.start()
    try:
        code = _run_agent(job)
        return watch.report(code) if code else 0
    finally:
        watch.leave()


def _run_agent(job: Job) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    words = job.command(time.strftime("%Y%m%d%H%M%S"))
    with _environment(job.environment()), _quiet_agent():
        try:
            elastic_launch(_launch_config(job), words[0])(*words[1:])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            logger.error("rank %d (pid %d) ended with exit code %d", rank, failure.pid, failure.exitcode)
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        except SignalException as error:
            return 128 + int(error.sigval)
    return 0


def _launch_config(job: Job) -> Any:
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=job.num_nodes,
        max_nodes=job.num_nodes,
        nproc_per_node=job.num_ranks,
        run_id="deepspeed",
        rdzv_backend="static",
        rdzv_endpoint=f"{job.master_addr}:{job.master_port}",
        rdzv_configs={"rank": job.node_rank, "timeout": _MEET_S},
        max_restarts=0,
        start_method="spawn",
    )


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
