"""Whether the host has the memory that an engine will need, before the engine takes any of it."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepspeed.runtime.zero import collectives
from deepspeed.runtime.zero.collectives import Comm
from deepspeed.runtime.zero.forms import MasterForm, MomentForm
from deepspeed.runtime.zero.needs import Facts, Needs, host_grad_dtype, memory_needs
from deepspeed.runtime.zero.settings import Accumulation, ZeroSettings
from deepspeed.utils.host_limits import Limit, find_limits, lockable_nbytes

logger = logging.getLogger("DeepSpeed")

OVERRIDE_VARIABLE = "DS_SKIP_MEMORY_CHECK"
_MOST_CHOICES = 4
_MOMENT_FORMS = (MomentForm.fp32, MomentForm.bf16, MomentForm.int8)
_OFFLOAD = "zero_optimization.offload_optimizer"
_SHARDED = ("HostShard", "HostMaster", "DeviceMaster", "optimizer")


class Choice(NamedTuple):
    """Settings that hold less, and how they are written in the configuration."""

    words: str
    settings: ZeroSettings


class _Amount(NamedTuple):
    """What one rank needs under some settings."""

    resident_nbytes: int
    address_nbytes: int

    @classmethod
    def of(cls, needs: Needs) -> _Amount:
        return cls(needs.nbytes(on_host=True), needs.address_nbytes())


@dataclass(frozen=True)
class _RankReport:
    """What a rank tells all others."""

    amount: _Amount
    by_kind: Counter[str]  # bytes of the buffers of one name
    choices: Sequence[_Amount]  # in the order of `smaller_settings`, which is the same on every rank
    sharded_nbytes: int  # what half the shard would halve
    limits: Sequence[Limit]
    skips: bool


class _Verdict(NamedTuple):
    """A limit that does not suffice."""

    limit: Limit
    members: Sequence[tuple[int, _RankReport]]  # the ranks that share it

    def needed(self, amounts: Sequence[_Amount]) -> int:
        """Bytes that count for the limit, of one amount a member."""
        if self.limit.is_address_space:
            return sum(amount.address_nbytes for amount in amounts)
        return sum(amount.resident_nbytes for amount in amounts)

    @property
    def need_nbytes(self) -> int:
        return self.needed([report.amount for _, report in self.members])


def check_memory(settings: ZeroSettings, facts: Facts, comm: Comm) -> None:
    """Stop, on every rank, if a limit of any machine cannot hold what its ranks will need together.

    A collective. A limit on page-locked memory is a warning only, since the ring works without.

    Args:
        settings: of the engine.
        facts: its layout.
        comm: the ranks.

    Raises:
        MemoryError: with a table of what is needed, what is there, and which settings would fit.
    """
    needs = memory_needs(settings, facts)
    _warn_of_memlock(settings, needs)
    choices = list(smaller_settings(settings, facts))
    report = _RankReport(
        _Amount.of(needs),
        _by_kind(needs),
        [_Amount.of(memory_needs(choice.settings, facts)) for choice in choices],
        sum(entry.nbytes + entry.reserved_nbytes for entry in needs.on(True) if entry.owner in _SHARDED),
        find_limits(),
        os.environ.get(OVERRIDE_VARIABLE) == "1",
    )
    reports = collectives.gather_objects(report, comm)
    verdict = _worst_verdict(reports)
    if verdict is None:
        return
    text = _table(verdict, [choice.words for choice in choices], settings.stage > 0)
    if any(one.skips for one in reports):
        if comm.rank == 0:
            logger.warning("%s is set: going on all the same. %s", OVERRIDE_VARIABLE, text)
        return
    raise MemoryError(text)


def smaller_settings(settings: ZeroSettings, facts: Facts) -> Iterator[Choice]:
    """Settings that hold less on the host than the present ones, cheapest first.

    Cheapest are those that change no bit of the moments, then those with fewer changes.
    """
    forms = settings.forms
    if not (settings.offload and facts.is_fused):
        return
    grads = host_grad_dtype(settings, facts.wire_dtype, facts.is_fused)
    can_narrow = grads is torch.float32 and facts.wire_dtype.itemsize == 2
    can_split = forms.master is MasterForm.fp32 and facts.weight_dtype is torch.bfloat16
    moments_now = _MOMENT_FORMS.index(forms.moments)
    found = itertools.product(_MOMENT_FORMS[moments_now:], (False, True)[: 1 + can_split], (False, True))
    by_cost = sorted(found, key=lambda choice: (_MOMENT_FORMS.index(choice[0]), choice[1] + choice[2]))
    for moments, splits, narrows in by_cost:
        if narrows and not can_narrow:
            continue
        words, changed = [], settings
        if narrows:
            name = "bf16" if facts.wire_dtype is torch.bfloat16 else "fp16"
            words.append(f'gradient_accumulation_steps 1, or data_types.grad_accum_dtype "{name}"')
            changed = dataclasses.replace(changed, accumulation=Accumulation(keeps_16bit=True))
        if splits:
            words.append(f'{_OFFLOAD}.master_weights "bf16_residual"')
        if moments is not forms.moments:
            words.append(f'{_OFFLOAD}.optimizer_states "{moments.value}"')
        master = MasterForm.bf16_residual if splits else forms.master
        smaller = dataclasses.replace(forms, master=master, moments=moments)
        if words:
            yield Choice("; ".join(words), dataclasses.replace(changed, forms=smaller))


def _warn_of_memlock(settings: ZeroSettings, needs: Needs) -> None:
    """Say before it fails that the ring will not be page-locked."""
    wanted, lockable = sum(entry.nbytes for entry in needs.held if entry.pinned), lockable_nbytes()
    if lockable is not None and wanted > lockable:
        logger.warning(
            "zero_optimization.offload_optimizer.pin_memory: expected %d bytes to be page-locked within the "
            "memlock limit, got %d left. Raise it (ulimit -l unlimited), or set pin_memory to false.",
            wanted,
            lockable,
        )


def _by_kind(needs: Needs) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for entry in needs.on(on_host=True):
        kinds[entry.name.split("[")[0]] += entry.nbytes
    return kinds


def _worst_verdict(reports: Sequence[_RankReport]) -> _Verdict | None:
    """Find the limit that is exceeded most; the same on every rank."""
    verdicts: dict[str, _Verdict] = {}
    for rank, report in enumerate(reports):
        for limit in report.limits:
            known = verdicts.setdefault(limit.scope, _Verdict(limit, []))
            tightest = min(known.limit, limit, key=lambda each: each.free_nbytes)
            verdicts[limit.scope] = _Verdict(tightest, [*known.members, (rank, report)])
    exceeded = [one for one in verdicts.values() if one.need_nbytes > one.limit.free_nbytes]
    return max(exceeded, key=lambda one: one.need_nbytes / max(1, one.limit.free_nbytes), default=None)


def _table(verdict: _Verdict, words: Sequence[str], is_sharded: bool) -> str:
    """What is needed, what is there, what would fit."""
    limit, free = verdict.limit, verdict.limit.free_nbytes
    ranks = [rank for rank, _ in verdict.members]
    what = "address space" if limit.is_address_space else "host memory"
    kinds: Counter[str] = Counter()
    for _, report in verdict.members:
        kinds.update(report.by_kind)
    lines = [
        f"initialize: expected at most {_gib(free)} of {what} to be needed ({limit.name}), got "
        f"{_gib(verdict.need_nbytes)} for rank(s) {', '.join(map(str, ranks))} together. Take settings that "
        f"fit, from the table, or set {OVERRIDE_VARIABLE}=1 in the environment to try all the same.",
        "  needed",
        *(f"    {_gib(nbytes):>12}  {kind}" for kind, nbytes in kinds.most_common()),
    ]
    reserved = verdict.need_nbytes - sum(kinds.values())
    if reserved:
        lines.append(f"    {_gib(reserved):>12}  address space for gradients in fp32")
    lines += [f"    {_gib(verdict.need_nbytes):>12}  in all", "  there"]
    for other in verdict.members[0][1].limits:
        binds = "   <- too little" if other.scope == limit.scope else ""
        shown = free if binds else other.free_nbytes
        lines.append(f"    {_gib(shown):>12}  {other.name}{binds}")
    fitting = [*_fitting(verdict, words)][:_MOST_CHOICES]
    if is_sharded:
        fitting += _more_ranks(verdict)
    lines += ["  would fit, cheapest first", *fitting] if fitting else ["  no setting would fit"]
    return "\n".join(lines)


def _fitting(verdict: _Verdict, words: Sequence[str]) -> Iterator[str]:
    """The choices under which all ranks together fit."""
    for index, choice in enumerate(words):
        need = verdict.needed([report.choices[index] for _, report in verdict.members])
        if need <= verdict.limit.free_nbytes:
            yield f"    {_gib(need):>12}  {choice}"


def _more_ranks(verdict: _Verdict) -> list[str]:
    """How many times the ranks it takes, the rest as it is."""
    sharded = sum(report.sharded_nbytes for _, report in verdict.members)
    left = verdict.limit.free_nbytes - (verdict.need_nbytes - sharded)
    if left <= 0:
        return []
    factor = math.ceil(sharded / left)
    need = verdict.need_nbytes - sharded + sharded // factor
    where = "ranks" if verdict.limit.is_address_space else "nodes, with as many ranks each"
    return [f"    {_gib(need):>12}  {factor} times the {where}"]


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
