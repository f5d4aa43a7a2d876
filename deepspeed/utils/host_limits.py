"""How much host memory may still be taken: by this machine, this control group and this process."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Limit", "find_limits", "lockable_nbytes"]

_CAP_IPC_LOCK = 14
# Version 1 writes "no limit" as the largest multiple of a page below 2 ** 63.
_NO_LIMIT_NBYTES = 1 << 60


@dataclass(frozen=True)
class Limit:
    """One thing that bounds host memory.

    Args:
        name: what it is, in words.
        scope: equal for all processes that share it, on whatever machine they are.
        free_nbytes: what is left of it.
        is_address_space: it counts address space; else memory that is in use.
    """

    name: str
    scope: str
    free_nbytes: int
    is_address_space: bool = False


def find_limits(root: Path = Path("/")) -> list[Limit]:
    """Find everything that bounds this process's memory now.

    Args:
        root: where `proc` and `sys` are.
    """
    machine = _machine_name(root)
    limits = []
    available = _fields_nbytes(root / "proc/meminfo").get("MemAvailable")
    if available is not None:
        limits.append(Limit("machine: MemAvailable", machine, available))
    limits += _cgroup_limits(root, machine)
    limits += _process_limits(root, machine)
    return limits


def lockable_nbytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still page-lock; None: as many as there are."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    status = _lines(root / "proc/self/status")
    capable = any(line.startswith("CapEff:") and _has_ipc_lock(line.split()[1]) for line in status)
    if soft == resource.RLIM_INFINITY or capable:
        return None
    return max(0, soft - _fields_nbytes(root / "proc/self/status").get("VmLck", 0))


def _has_ipc_lock(capabilities: str) -> bool:
    return bool(int(capabilities, 16) >> _CAP_IPC_LOCK & 1)


def _process_limits(root: Path, machine: str) -> Iterator[Limit]:
    """Limits of this process alone, as `ulimit` sets them."""
    used = _fields_nbytes(root / "proc/self/status")
    pid = (root / "proc/self").resolve().name
    for name, kind, field in (
        ("ulimit -v", resource.RLIMIT_AS, "VmSize"),
        ("ulimit -d", resource.RLIMIT_DATA, "VmData"),
    ):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            free = max(0, soft - used.get(field, 0))
            yield Limit(f"process: {name}", f"{machine}/{pid}/{field}", free, is_address_space=True)


def _cgroup_limits(root: Path, machine: str) -> Iterator[Limit]:
    """This process's control group and all above it that have a limit, of both versions."""
    for mount, kind, mount_root, path in _memory_cgroups(root):
        inner = path.removeprefix(mount_root.rstrip("/")).strip("/")
        # A group outside what the mount shows, or one that a container cannot see: the mount's own.
        folder = mount / inner if ".." not in inner and (mount / inner).is_dir() else mount
        while True:
            free = _free_v2(folder) if kind == "cgroup2" else _free_v1(folder)
            if free is not None:
                shown = "/" + str(folder.relative_to(root))
                yield Limit(f"cgroup: {shown}", f"{machine}/{folder.stat().st_ino}", max(0, free))
            if folder == mount or mount not in folder.parents:
                break
            folder = folder.parent


def _memory_cgroups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield for each mounted hierarchy with memory: mount point, type, the group it shows, our group."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = (part.split() for part in line.partition(" - "))
        if len(before) < 5 or len(after) < 3:
            continue
        kind, options, mount_root, mount = after[0], after[2], *before[3:5]
        if kind in paths and (kind == "cgroup2" or "memory" in options.split(",")):
            yield root / mount.lstrip("/"), kind, mount_root, paths[kind]


def _free_v2(folder: Path) -> int | None:
    """What is left in a group of version 2; page cache that can be dropped counts as free."""
    limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
    if limit is None or used is None:
        return None
    stat = _numbers(folder / "memory.stat")
    return limit - used + stat.get("inactive_file", 0) + stat.get("active_file", 0)


def _free_v1(folder: Path) -> int | None:
    """The same of version 1."""
    limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None or limit > _NO_LIMIT_NBYTES:
        return None
    stat = _numbers(folder / "memory.stat")
    return limit - used + stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)


def _machine_name(root: Path) -> str:
    """The same for all processes of one boot of one machine, whatever container they are in."""
    return "".join(_lines(root / "proc/sys/kernel/random/boot_id"))


def _number(path: Path) -> int | None:
    """The number that a file holds; None if there is no such file, or another word."""
    words = _lines(path)
    return int(words[0]) if words and words[0].strip().isdecimal() else None


def _numbers(path: Path) -> dict[str, int]:
    """`name number` lines."""
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _fields_nbytes(path: Path) -> dict[str, int]:
    """`name: number kB` lines, in bytes."""
    found = {}
    for line in _lines(path):
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            found[words[0].rstrip(":")] = int(words[1]) * 1024
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
