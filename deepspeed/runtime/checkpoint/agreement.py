"""How ranks agree on the steps of a save or a load, with a time limit, and without a collective.

Messages go through torch.distributed's store, which every backend has. A rank that does not come therefore
never leaves a collective half done: the others time out, say who is missing, and the process group is as it
was.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from deepspeed.runtime.checkpoint.names import CheckpointError

TIMEOUT_VARIABLE = "DS_CHECKPOINT_TIMEOUT_S"
_LONGEST_DEFAULT_S = 600.0
_BEAT_EVERY_S = 1.0
_FAREWELL_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1


class AbsentRankError(CheckpointError):
    """A rank gave no sign in time."""


class Agreement:
    """Exchanges one small message a rank at each stage of a save or load.

    Pattern: every rank posts its message; rank 0 collects them all and posts the collection; every rank reads
    it. So all ranks decide from the same messages. Stages are numbered by each rank for itself; a stage that
    fails is not counted, so that a later attempt of all ranks meets again. Lifetime: that of the engine; one
    instance on every rank, made in the same order.

    Args:
        rank: this rank.
        world: number of ranks.
        timeout_s: how long to wait for a rank that gives no sign.
        store: torch.distributed's store, with a prefix of its own; None for a world of one.
    """

    def __init__(self, rank: int, world: int, timeout_s: float, store: dist.Store | None) -> None:
        self._rank = rank
        self._world = world
        self._timeout_s = timeout_s
        self._store = store
        self._stage = 0

    @classmethod
    def make(cls, rank: int, world: int) -> Agreement:
        """An agreement over the default process group's store, with its time limit or the environment's."""
        if world == 1:
            return cls(rank, world, _LONGEST_DEFAULT_S, None)
        store = dist.distributed_c10d._get_default_store()
        # Counts the engines of this rank; the same on every rank, since all make them in the same order.
        mine = store.add(f"ds_checkpoint/engines/{rank}", 1)
        own_limit: Any = store  # typed without its property
        limit = min(own_limit.timeout.total_seconds(), _LONGEST_DEFAULT_S)
        timeout_s = float(os.environ.get(TIMEOUT_VARIABLE) or limit)
        return cls(rank, world, timeout_s, dist.PrefixStore(f"ds_checkpoint/{mine}", store))

    def exchange(self, call: str, message: Mapping[str, Any], arriving: bool = False) -> list[dict[str, Any]]:
        """Give a message to all ranks and get all ranks' messages.

        Args:
            call: what the user called, for errors.
            message: values that JSON can carry.
            arriving: it is the call's first; a rank that is missing has not made the call.

        Returns:
            The messages in rank order, the same on every rank.

        Raises:
            AbsentRankError: a rank did not come in time.
        """
        if self._store is None:
            return [dict(message)]
        own = f"{self._stage}/{self._rank}"
        verdict = f"{self._stage}/all"
        self._store.set(own, json.dumps(message))
        try:
            if self._rank == 0:
                keys = [f"{self._stage}/{rank}" for rank in range(self._world)]
                self._wait(keys, call, arriving)
                collected = [self._store.get(key).decode() for key in keys]
                self._store.set(verdict, json.dumps([json.loads(text) for text in collected]))
                for key in keys[1:]:
                    self._store.delete_key(key)
            else:
                self._wait([verdict], call, arriving)
            messages = json.loads(self._store.get(verdict).decode())
        finally:
            self._store.delete_key(own)
        if self._rank == 0 and self._stage:
            # Everybody has read it: they are one stage further.
            self._store.delete_key(f"{self._stage - 1}/all")
        self._stage += 1
        return messages

    def agree(self, call: str, error: BaseException | None) -> None:
        """Go on only if no rank has failed.

        Args:
            call: what the user called, for errors.
            error: what went wrong here; None: nothing.

        Raises:
            CheckpointError: the same words on every rank.
        """
        words = None if error is None else str(error) if isinstance(error, CheckpointError) else repr(error)
        messages = [message["error"] for message in self.exchange(call, {"error": words})]
        raise_first_errors(call, messages, error)

    def together(self, call: str, work: Callable[[], Any]) -> Any:
        """Do a piece of work on every rank, each its own; returns this rank's result.

        Args:
            call: what the user called, for errors.
            work: the piece.

        Raises:
            CheckpointError: it failed on a rank; the same words on every rank.
        """
        with self.at_work():
            result, error = attempt(work)
        self.agree(call, error)
        return result

    def part(self) -> None:
        """End a call: rank 0, whose process may hold the store, does not leave before all have read its last
        word."""
        if self._store is None:
            return
        gone = [f"gone/{self._stage}/{rank}" for rank in range(1, self._world)]
        if self._rank:
            self._store.set(gone[self._rank - 1], "1")
            return
        deadline = time.monotonic() + _FAREWELL_S
        while gone and time.monotonic() < deadline:
            read = [key for key in gone if self._store.check([key])]
            for key in read:
                self._store.delete_key(key)
            gone = [key for key in gone if key not in read]
            time.sleep(_FIRST_PAUSE_S if gone else 0)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let the other ranks wait for this one while the block runs, however long a disk takes."""
        if self._store is None:
            yield
            return
        done = threading.Event()
        thread = threading.Thread(target=self._beat_until, args=(done,), name="checkpoint-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _beat_until(self, done: threading.Event) -> None:
        assert self._store is not None
        for count in itertools.count():
            self._store.set(f"beat/{self._rank}", str(count))
            if done.wait(_BEAT_EVERY_S):
                return

    def _wait(self, keys: Sequence[str], call: str, arriving: bool) -> None:
        """Wait for keys, and beyond the limit as long as a rank says that it is at work."""
        assert self._store is not None
        pause_s, last, deadline = _FIRST_PAUSE_S, self._beats(), time.monotonic() + self._timeout_s
        missing = list(keys)
        while missing := [key for key in missing if not self._store.check([key])]:
            if time.monotonic() > deadline:
                beats = self._beats()
                if beats == last:
                    raise AbsentRankError(self._absence(call, missing, arriving))
                last, deadline = beats, time.monotonic() + self._timeout_s
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _beats(self) -> list[bytes]:
        assert self._store is not None
        keys = [f"beat/{rank}" for rank in range(self._world)]
        return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]

    def _absence(self, call: str, missing: Sequence[str], arriving: bool) -> str:
        ranks = [key.rpartition("/")[2] for key in missing]
        who = "rank 0" if ranks == ["all"] else f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        expected = f"all {self._world} ranks to {'call it' if arriving else 'go on'}"
        advice = "Call it on every rank, not on rank 0 only." if arriving else "Has it been killed?"
        return (
            f"{call}: expected {expected}, got no sign of {who} within {self._timeout_s:g} s. "
            f"{advice} {TIMEOUT_VARIABLE} sets the limit in seconds."
        )


def raise_first_errors(call: str, messages: Sequence[str | None], own: BaseException | None) -> None:
    """Raise one error for all ranks from each rank's words; None where nothing went wrong."""
    failed: dict[str, list[int]] = {}
    for rank, words in enumerate(messages):
        if words is not None:
            failed.setdefault(words, []).append(rank)
    if not failed:
        return
    parts = [_with_ranks(words, ranks, len(messages)) for words, ranks in failed.items()]
    raise CheckpointError(f"{call}: " + "; ".join(parts)) from own


def _with_ranks(words: str, ranks: Sequence[int], world: int) -> str:
    return words if len(ranks) == world else f"rank {', '.join(map(str, ranks))}: {words}"


def attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Call a function and keep its exception, so that the ranks can agree on it."""
    try:
        return work(), None
    except Exception as error:
        return None, error
