"""What a command line asks for: on all hosts, and on one of them."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from deepspeed.launcher import devices
from deepspeed.launcher.resources import Resources

__all__ = ["HostsJob", "Job"]

_LOCAL_RANK = "${local_rank}"  # the agent puts each rank's number here


@dataclass(frozen=True)
class Job:
    """What to run on this host.

    program: words before the script's arguments. num_ranks: of this host. master_addr, master_port: where the
        hosts meet. log_dir: where each rank's output goes, None for the launcher's own.
    pass_local_rank: whether ``--local_rank=N`` comes before the script's arguments.
    """

    program: tuple[str, ...]
    script_args: tuple[str, ...]
    num_ranks: int
    master_addr: str
    master_port: int
    log_dir: str | None = None
    pass_local_rank: bool = True
    num_nodes: int = 1
    node_rank: int = 0
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
        # RANK is known to the shell: hosts may share a file system, and a local rank is not one job's only.
        log = f"{self.log_dir}/{stamp}_rank"
        return ["/bin/sh", "-c", 'exec "$@" >"$0$RANK.log" 2>&1', log, *words]

    def environment(self) -> dict[str, str]:
        """Return what every rank finds in its environment beside the agent's variables.

        Source: LOCAL_SIZE, CROSS_RANK and CROSS_SIZE as DeepSpeed sets them. OMP_NUM_THREADS shares the cores
        among the ranks unless the user set it: N ranks with a thread a core each are slower than with their
        share.
        """
        made = {
            "LOCAL_SIZE": str(self.num_ranks),
            "CROSS_RANK": str(self.node_rank),
            "CROSS_SIZE": str(self.num_nodes),
            **self.env,
        }
        if self.num_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
            made["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // self.num_ranks))
        return made


@dataclass(frozen=True)
class HostsJob:
    """What to run on every host.

    hosts: slots by host; hosts and slots in the order of ranks. The rest is as in ``Job``.
    """

    hosts: Resources
    program: tuple[str, ...]
    script_args: tuple[str, ...]
    master_addr: str
    master_port: int
    log_dir: str | None = None
    pass_local_rank: bool = True

    def on_host(self, node_rank: int) -> Job:
        """Return what one host runs; called on that host, because devices are looked for.

        Args:
            node_rank: Number of the host, in the order of ``hosts``.
        """
        slots = list(self.hosts.values())[node_rank]
        visible = {devices.VISIBLE: ",".join(map(str, slots))} if devices.accelerator_count() > 0 else {}
        return Job(
            program=self.program,
            script_args=self.script_args,
            num_ranks=len(slots),
            master_addr=self.master_addr,
            master_port=self.master_port,
            log_dir=self.log_dir,
            pass_local_rank=self.pass_local_rank,
            num_nodes=len(self.hosts),
            node_rank=node_rank,
            env=visible,
        )

    def to_text(self) -> str:
        """Return the job as one word that no shell and no launcher changes."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def from_text(cls, text: str) -> HostsJob:
        """Return the job that ``to_text`` wrote."""
        values: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text))
        for name in ("program", "script_args"):
            values[name] = tuple(values[name])
        return cls(**values)
