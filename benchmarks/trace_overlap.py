"""What a torch-profiler trace says: how much of each transfer hides behind compute, what the host waits for.

Works on the events of a Chrome trace, as `torch.profiler` exports it; no GPU is needed to read one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# Marks that the traced job sets: the parts of a step, and when a tile of the host's optimizer step was handed
# to its threads and when it was there.
PARTS = ("forward", "backward", "step")
TILE_SUBMITTED, TILE_COMPUTED = "host tile submitted", "host tile computed"
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
# Part of a NCCL kernel's name -> what it does here: a bucket is reduced to each owner in turn.
_COLLECTIVES = {"AllGather": "all-gather", "AllReduce": "all-reduce", "Reduce": "reduce-scatter"}
KINDS = (*_COLLECTIVES.values(), "download", "upload")

Event = Mapping[str, Any]
Span = tuple[float, float]


class Transfer(NamedTuple):
    """All transfers of one kind."""

    count: int
    busy_us: float  # time in which at least one was under way
    hidden_us: float  # of it, with compute on the device or in the host's optimizer at the same time


class HostWait(NamedTuple):
    """Calls of the main thread that waited for the device."""

    name: str
    part: str  # forward, backward, step, or empty
    count: int
    total_us: float


def transfers(events: Iterable[Event]) -> dict[str, Transfer]:
    """Returns what was found of each kind of transfer.

    On several ranks a collective's time holds the wait for the slowest of them.
    """
    spans: dict[str, list[Span]] = {kind: [] for kind in (*KINDS, "compute")}
    events = list(events)
    for event in events:
        kind = _kind(event)
        if kind is not None:
            spans[kind].append(_span(event))
    busy = {kind: _union(found) for kind, found in spans.items()}
    compute = _union([*busy.pop("compute"), *_host_tiles(events)])
    return {
        kind: Transfer(len(spans[kind]), _length(found), _length(_intersection(found, compute)))
        for kind, found in busy.items()
    }


def host_waits(events: Iterable[Event]) -> list[HostWait]:
    """Returns the waits of the thread that trains, longest first."""
    events = [event for event in events if event.get("ph") == "X"]
    parts = [event for event in events if event["name"] in PARTS and event.get("cat") == "user_annotation"]
    main_threads = {event["tid"] for event in parts}
    found: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event["name"] in WAITS and event["tid"] in main_threads:
            inside = [part["name"] for part in parts if _contains(_span(part), event["ts"])]
            found.setdefault((event["name"], inside[0] if inside else ""), []).append(event["dur"])
    waits = [HostWait(*key, len(times), sum(times)) for key, times in found.items()]
    return sorted(waits, key=lambda wait: -wait.total_us)


def _kind(event: Event) -> str | None:
    """What an event of the device is; None for what is not one."""
    if event.get("ph") != "X" or event.get("cat") not in ("kernel", "gpu_memcpy"):
        return None
    name = event["name"]
    if event["cat"] == "gpu_memcpy":
        return "download" if "DtoH" in name else "upload" if "HtoD" in name else None
    if "nccl" not in name.lower():
        return "compute"
    return next((kind for part, kind in _COLLECTIVES.items() if part in name), None)


def _host_tiles(events: Sequence[Event]) -> list[Span]:
    """From each tile's submission to its end, in order: meanwhile the host's threads had something to do."""
    marks = [event for event in events if event.get("ph") == "X" and event.get("cat") == "user_annotation"]
    begun = sorted(event["ts"] for event in marks if event["name"] == TILE_SUBMITTED)
    ended = sorted(event["ts"] for event in marks if event["name"] == TILE_COMPUTED)
    return list(zip(begun, ended, strict=True))


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _contains(span: Span, time: float) -> bool:
    return span[0] <= time < span[1]


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def _union(spans: Iterable[Span]) -> list[Span]:
    """Disjoint spans in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _intersection(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """Of disjoint spans."""
    both = [(max(a[0], b[0]), min(a[1], b[1])) for a in first for b in second]
    return [(start, end) for start, end in both if end > start]
