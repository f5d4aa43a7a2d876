"""Which devices of which hosts a job runs on: hostfile, --include, --exclude, --num_nodes, --num_gpus.

Pure functions over text; a device is a slot number on a host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Resources", "choose_resources", "parse_filter", "parse_hostfile"]

Resources = dict[str, list[int]]  # host -> slots, in the order of ranks

_HOST_LINE = re.compile(r"^(\S+)\s+slots=(\d+)$")


def parse_hostfile(path: str | None) -> dict[str, int] | None:
    """Return slots by host, or None when there is no hostfile.

    Args:
        path: File with lines "host slots=N"; None, "" and the word "None" mean no file, and so does a missing
            one.

    Raises:
        ValueError: A line of another form, a host named twice, or no host at all.
    """
    if not path or path == "None" or not Path(path).is_file():
        return None
    hosts: dict[str, int] = {}
    for number, raw in enumerate(Path(path).read_text().splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        match = _HOST_LINE.match(line)
        if match is None or match[1] in hosts:
            raise ValueError(
                f"--hostfile: expected lines 'host slots=N' with each host once, "
                f"got {raw!r} in line {number} of {path}."
            )
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise ValueError(f"--hostfile: expected at least one host, got none in {path}.")
    return hosts


def parse_filter(text: str, flag: str) -> dict[str, list[int] | None]:
    """Return slots by host from "host", "host:0,2" or several of these joined by "@"; None means all slots.

    Raises:
        ValueError: Text of another form.
    """
    chosen: dict[str, list[int] | None] = {}
    for part in filter(None, text.split("@")):
        host, colon, slots = part.strip().partition(":")
        numbers = slots.split(",")
        if not host or (colon and not all(number.strip().isdigit() for number in numbers)) or host in chosen:
            raise ValueError(f"{flag}: expected HOST[:SLOT,...][@HOST...] with each host once, got {text!r}.")
        chosen[host] = sorted({int(number) for number in numbers}) if colon else None
    return chosen


def choose_resources(
    pool: Mapping[str, Sequence[int]],
    include: str = "",
    exclude: str = "",
    num_nodes: int = -1,
    num_gpus: int = -1,
) -> Resources:
    """Return what a job runs on.

    Args:
        pool: Slots by host.
        include: Filter to keep; everything when empty.
        exclude: Filter to leave out; not together with include.
        num_nodes: First hosts to keep; -1 for all. Not together with a filter.
        num_gpus: First slots to keep on each host; -1 for all. Not together with a filter.

    Raises:
        ValueError: Contradictory flags, an unknown host or slot, or nothing left.
    """
    if include and exclude:
        raise ValueError(f"--include: expected no --exclude beside it, got {exclude!r}. Use one of them.")
    if (include or exclude) and (num_nodes != -1 or num_gpus != -1):
        raise ValueError(
            "--num_gpus, --num_nodes: expected neither beside --include or --exclude. Use one way to choose."
        )
    for flag, count in (("--num_nodes", num_nodes), ("--num_gpus", num_gpus)):
        if count != -1 and count < 1:
            raise ValueError(f"{flag}: expected at least 1, got {count}.")
    if include or exclude:
        chosen = _apply_filter(pool, include, exclude)
    else:
        hosts = list(pool)[: None if num_nodes == -1 else num_nodes]
        chosen = {host: _first_slots(pool[host], num_gpus, host) for host in hosts}
    chosen = {host: slots for host, slots in chosen.items() if slots}
    if not chosen:
        raise ValueError("--exclude: expected it to leave a device to run on, got none.")
    return chosen


def _first_slots(slots: Sequence[int], count: int, host: str) -> list[int]:
    if count > len(slots):
        raise ValueError(f"--num_gpus: expected at most {len(slots)}, the devices of {host}, got {count}.")
    return list(slots[: None if count == -1 else count])


def _apply_filter(pool: Mapping[str, Sequence[int]], include: str, exclude: str) -> Resources:
    flag = "--include" if include else "--exclude"
    wanted = parse_filter(include or exclude, flag)
    for host, slots in wanted.items():
        if host not in pool:
            raise ValueError(f"{flag}: expected one of the hosts {', '.join(pool)}, got {host!r}.")
        for slot in slots or ():
            if slot not in pool[host]:
                raise ValueError(f"{flag}: expected slots of {host} among {list(pool[host])}, got {slot}.")
    if include:  # in the order of the pool, so that the first host does not depend on how flags are written
        return {host: wanted[host] or list(pool[host]) for host in pool if host in wanted}
    left: Resources = {}
    for host, available in pool.items():
        out = wanted.get(host, [])
        left[host] = [] if out is None else [slot for slot in available if slot not in out]
    return left
