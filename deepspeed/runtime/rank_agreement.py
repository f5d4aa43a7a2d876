"""Whether all ranks were given the same configuration, optimizer and model, before they do anything together.

A rank that steps when the others do not, or cuts its gradients into other buckets, makes all of them wait
until the time limit of a collective; one that clips or decays otherwise trains its shard otherwise, unseen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_settings import ReportKeys
from deepspeed.runtime.zero import collectives
from deepspeed.runtime.zero.collectives import Comm
from deepspeed.runtime.zero.offload_config import OffloadOptimizerConfig

_OFFLOAD = "zero_optimization.offload_optimizer"
# Keys that may differ: they change no number and no collective.
RANKS_OWN = (
    *ReportKeys.model_fields,  # what a rank prints and writes, how often and where
    "activation_checkpointing",  # the same numbers, computed again or kept
    f"{_OFFLOAD}.pin_memory",  # not every host allows it
    f"{_OFFLOAD}.nvme_path",
    "zero_optimization.offload_param",
    "aio",
    "disable_python_gc",
    "vocabulary_size",
)
_LONGEST_SHOWN = 160  # characters of a value
_MOST_SHOWN = 6  # keys
_PLAIN = (bool, int, float, str, torch.dtype, type(None))


class _Facts(NamedTuple):
    """What one rank was given, in words that are the same on every rank for the same thing."""

    settings: dict[str, str]  # by the full path of their keys
    optimizer: dict[str, str]  # its class, and the options of its groups
    tensors: list[str]  # parameters and buffers in model order

    def digest(self) -> str:
        parts = (sorted(self.settings.items()), sorted(self.optimizer.items()), self.tensors)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def check_ranks_agree(
    config: DeepSpeedConfig, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, comm: Comm
) -> None:
    """Stop, on every rank, unless all of them were given the same.

    A collective, and the first of an engine; ranks exchange digests, and the facts only when these differ.
    It comes before the model's values are spread, and so before the exchange of the memory check, which can
    read how much memory is left only when the model is where it will be.

    Compared are the configuration with its defaults, except `RANKS_OWN`; the optimizer's class and the plain
    options of its groups, whoever made it; names, shapes, dtypes and groups of all parameters and buffers.

    Args:
        config: of this rank.
        module: of this rank, its floating parameters in any dtype if the configuration casts them.
        optimizer: the inner optimizer, if any.
        comm: the data-parallel ranks.

    Raises:
        ValueError: the same words on every rank: what differs, and which ranks have which value.
    """
    if comm.world == 1:
        return
    own = _Facts(_settings(config), _options(optimizer), list(_tensors(config, module, optimizer)))
    if len(set(collectives.gather_objects(own.digest(), comm))) > 1:
        raise ValueError(_differences(collectives.gather_objects(own, comm)))


def _settings(config: DeepSpeedConfig) -> dict[str, str]:
    tree = config.model_dump(by_alias=True)
    if config.zero_optimization.offload_optimizer is None:  # the same as one that says "none"
        tree["zero_optimization"]["offload_optimizer"] = OffloadOptimizerConfig().model_dump()
    return {path: words for path, words in _leaves(tree) if not _is_ranks_own(path)}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", _words(value)


def _words(value: Any) -> str:
    """A value as text; of an object that is not plain its type, since its own text may name an address."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_words, value))}]"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


def _is_ranks_own(path: str) -> bool:
    return any(f"{path}.".startswith(f"{key}.") for key in RANKS_OWN)


def _options(optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    if optimizer is None:
        return {}
    options = {"optimizer": type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        path = f"optimizer.param_groups[{index}]"
        options[f"len({path}['params'])"] = str(len(group["params"]))
        others = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        options.update(_leaves(others, f"{path}."))
    return options


def _tensors(
    config: DeepSpeedConfig, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[str]:
    """Parameters as they will be once cast, and where the optimizer has them; then buffers."""
    groups = optimizer.param_groups if optimizer is not None else []
    places = {
        id(param): f"number {number} of group {index}"
        for index, group in enumerate(groups)
        for number, param in enumerate(group["params"])
    }
    casts = config.fp16.enabled or config.bf16.enabled
    for name, param in module.named_parameters():
        dtype = config.dtype if casts and param.is_floating_point() else param.dtype
        place = places.get(id(param), "in no group") if param.requires_grad else "frozen"
        yield f"{name} {list(param.shape)} {dtype}, {place}"
    for name, buffer in module.named_buffers():
        yield f"{name} {list(buffer.shape)} {buffer.dtype}, a buffer"


def _differences(every: Sequence[_Facts]) -> str:
    """The error: settings that differ, else options of the optimizer, else the first tensor."""
    advice = "Pass the same configuration to deepspeed.initialize on every rank."
    lines = list(_differing([facts.settings for facts in every]))
    if not lines:
        advice = "Build the same optimizer and the same model on every rank, in the same order."
        lines = list(_differing([facts.optimizer for facts in every]))
        rows = zip_longest(*[facts.tensors for facts in every])
        first = next(((index, row) for index, row in enumerate(rows) if len(set(row)) > 1), None)
        if first is not None:
            index, row = first
            lines.append(
                "model: expected the same parameters and buffers on every rank, got at "
                f"number {index} {_by_value(row)}."
            )
    if len(lines) > _MOST_SHOWN:
        lines[_MOST_SHOWN:] = [f"{len(lines) - _MOST_SHOWN} more differ."]
    return "\n".join([*lines[:-1], f"{lines[-1]} {advice}"])


def _differing(every: Sequence[Mapping[str, str]]) -> Iterator[str]:
    for path in dict.fromkeys(path for facts in every for path in facts):
        values = [facts.get(path) for facts in every]
        if len(set(values)) > 1:
            yield f"{path}: expected the same value on every rank, got {_by_value(values)}."


def _by_value(values: Sequence[str | None]) -> str:
    """Each value with the ranks that have it."""
    ranks: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{_short(value)} on {_ranges(members)}" for value, members in ranks.items())


def _short(value: str | None) -> str:
    if value is None:
        return "nothing"
    return value if len(value) <= _LONGEST_SHOWN else f"{value[:_LONGEST_SHOWN]}..."


def _ranges(ranks: Sequence[int]) -> str:
    """Ascending ranks in words: `rank 1`, `ranks 0-6, 8`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank{'s' * (len(ranks) > 1)} {words}"
