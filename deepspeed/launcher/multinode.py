"""The command lines that start a job on several hosts: one process a host, which starts that host's ranks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from deepspeed.launcher.job import HostsJob

__all__ = ["LAUNCHERS", "Launch", "Launcher", "build_commands"]


@dataclass(frozen=True)
class Launch:
    """A job and how to reach its hosts.

    exports: variables for every host. cwd: where every host runs it. extra_args: words for the launcher.
    ssh_port: None for ssh's own choice. venv_script: sourced on every host before.
    """

    job: HostsJob
    exports: dict[str, str]
    cwd: str
    extra_args: tuple[str, ...] = ()
    ssh_port: int | None = None
    venv_script: str | None = None
    python: str = field(default_factory=lambda: sys.executable)

    @property
    def hosts(self) -> list[str]:
        """Host names in the order of ranks."""
        return list(self.job.hosts)

    def node_words(self, *more: str) -> list[str]:
        """Return the command that a host runs.

        Args:
            more: Words after it.
        """
        return [
            self.python, "-u", "-m", "deepspeed.launcher.node", f"--job={self.job.to_text()}", *more,
        ]  # fmt: skip

    def shell_line(self, *more: str) -> str:
        """Return the same for a shell on another host, with its environment and folder.

        Args:
            more: Words after it.
        """
        source = [f". {shlex.quote(self.venv_script)}"] if self.venv_script else []
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.exports.items()]
        return "; ".join(
            [*source, *exports, f"cd {shlex.quote(self.cwd)}", shlex.join(self.node_words(*more))]
        )


def _pdsh(launch: Launch) -> list[list[str]]:
    # pdsh itself replaces %n by the number of the host, and %% by a percent sign. It holds the standard input
    # of every host open as long as it lives.
    line = launch.shell_line("--end_with_stdin").replace("%", "%%") + " --node_rank=%n"
    hosts = ",".join(launch.hosts)
    return [["pdsh", "-S", "-f", "1024", "-w", hosts, *launch.extra_args, line]]


def _ssh(launch: Launch) -> list[list[str]]:
    port = ["-p", str(launch.ssh_port)] if launch.ssh_port else []
    options = ["-o", "BatchMode=yes", *port, *launch.extra_args]
    return [
        ["ssh", *options, host, launch.shell_line(f"--node_rank={number}", "--end_with_stdin")]
        for number, host in enumerate(launch.hosts)
    ]


def _openmpi(launch: Launch) -> list[list[str]]:
    names = [word for name in launch.exports for word in ("-x", name)]
    port = ["--mca", "plm_rsh_args", f"-p {launch.ssh_port}"] if launch.ssh_port else []
    hosts = ",".join(f"{host}:1" for host in launch.hosts)
    # Unbound: otherwise all ranks of a host would share the core of their launcher.
    place = ["-n", str(len(launch.hosts)), "--host", hosts, "--map-by", "node", "--bind-to", "none"]
    return [["mpirun", *place, *port, *launch.extra_args, *names, *launch.node_words()]]


def _hydra(launch: Launch) -> list[list[str]]:
    exports = [word for name, value in launch.exports.items() for word in ("-genv", name, value)]
    place = ["-n", str(len(launch.hosts)), "-ppn", "1", "-hosts", ",".join(launch.hosts)]
    return [["mpirun", *place, *launch.extra_args, *exports, *launch.node_words()]]


def _impi(launch: Launch) -> list[list[str]]:
    ((mpirun, *words),) = _hydra(launch)
    return [[mpirun, "-genv", "I_MPI_PIN", "0", *words]]


def _mvapich(launch: Launch) -> list[list[str]]:
    ((mpirun, *words),) = _hydra(launch)
    return [[mpirun, "-genv", "MV2_ENABLE_AFFINITY", "0", *words]]


def _slurm(launch: Launch) -> list[list[str]]:
    count = str(len(launch.hosts))
    place = [
        "--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", "--nodelist", ",".join(launch.hosts),
        "--cpu-bind=none", "--kill-on-bad-exit=1", "--export=ALL",
    ]  # fmt: skip
    return [["srun", *place, *launch.extra_args, *launch.node_words()]]


class Launcher(NamedTuple):
    """One way to start a process on several hosts.

    program: executable that must be there. commands: makes the command lines, one or one a host.
    takes_ssh_port, takes_venv_script: whether these flags have an effect with it.
    finds_address: whether the address of the first host is asked for through ssh.
    """

    program: str
    commands: Callable[[Launch], list[list[str]]]
    takes_ssh_port: bool = False
    takes_venv_script: bool = False
    finds_address: bool = True


LAUNCHERS = {
    "pdsh": Launcher("pdsh", _pdsh, takes_ssh_port=True, takes_venv_script=True),
    "ssh": Launcher("ssh", _ssh, takes_ssh_port=True, takes_venv_script=True),
    "openmpi": Launcher("mpirun", _openmpi, takes_ssh_port=True),
    "mpich": Launcher("mpirun", _hydra),
    "mvapich": Launcher("mpirun", _mvapich),
    "impi": Launcher("mpirun", _impi),
    "slurm": Launcher("srun", _slurm, finds_address=False),
}


def build_commands(launcher: str, launch: Launch) -> tuple[list[list[str]], dict[str, str]]:
    """Return the command lines, and what their own environment needs beside this process's.

    Args:
        launcher: Name in ``LAUNCHERS``.
        launch: Job and hosts.

    Raises:
        ValueError: A flag that this launcher has no use for.
    """
    kind = LAUNCHERS[launcher]
    for flag, value, taken in (
        ("--ssh_port", launch.ssh_port, kind.takes_ssh_port),
        ("--venv_script", launch.venv_script, kind.takes_venv_script),
    ):
        if value is not None and not taken:
            raise ValueError(
                f"{flag}: expected pdsh or ssh as --launcher, got {value!r} with {launcher}. "
                "Leave it out, or change the launcher."
            )
    own = dict(launch.exports)
    if launcher == "pdsh":
        own["PDSH_RCMD_TYPE"] = "ssh"
        if launch.ssh_port:
            own["PDSH_SSH_ARGS_APPEND"] = f"-p {launch.ssh_port}"
    return kind.commands(launch), own
