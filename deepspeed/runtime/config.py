"""The DeepSpeed configuration: read, checked as a whole, and frozen.

``DeepSpeedConfig(source, world_size)`` takes what ``deepspeed.initialize`` takes. It either holds a complete,
valid configuration or raises one error that lists every problem by its full path. It needs no process group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import PrivateAttr, ValidationError

from deepspeed.runtime.config_batch import MICRO, STEPS, TRAIN, complete_triangle
from deepspeed.runtime.config_features import take_features
from deepspeed.runtime.config_forms import check_forms
from deepspeed.runtime.config_notices import find_notices
from deepspeed.runtime.config_problems import DeepSpeedConfigError, Problems
from deepspeed.runtime.config_refusals import refuse_keys
from deepspeed.runtime.config_sections import low_precision_dtype
from deepspeed.runtime.config_settings import Settings
from deepspeed.runtime.config_source import ConfigSource, choose_config, read_config
from deepspeed.runtime.config_tree import Tree, canonical_tree, drop_auto, drop_unknown, paths_of

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError", "choose_config", "read_config"]

_TRIANGLE = (TRAIN, MICRO, STEPS)


class DeepSpeedConfig(Settings):
    """A complete configuration: the JSON's keys as attributes, with defaults and the derived batch triangle.

    Attributes are those of ``Settings``. ``raw`` is the mapping exactly as it was passed.
    """

    _raw: Mapping[str, Any] = PrivateAttr()
    _world_size: int = PrivateAttr()

    def __init__(self, config: ConfigSource, world_size: int = 1) -> None:
        """Read and check a configuration.

        Args:
            config: Mapping, path of a JSON file, JSON text, or JSON text in base64.
            world_size: Number of data-parallel ranks, for the batch triangle.

        Raises:
            DeepSpeedConfigError: Unknown keys, wrong values, contradictions, leftover "auto"; all are listed.
            NotImplementedError: Only features that DeepSpeed has and this package has not.
        """
        raw = read_config(config)
        super().__init__(**_checked_values(raw, world_size))
        self._raw = raw
        self._world_size = world_size

    @property
    def raw(self) -> Mapping[str, Any]:
        """The mapping as passed, or as read from the file: what ``engine.config`` shows."""
        return self._raw

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks that the batch triangle was derived for."""
        return self._world_size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights on the device: fp16, bf16 or fp32."""
        return low_precision_dtype(self.fp16, self.bf16)

    @property
    def gradient_clipping_is_default(self) -> bool:
        """Whether clipping at 1.0 comes from the default and not from the user; worth a line in the log."""
        return "gradient_clipping" not in self.model_fields_set

    @property
    def notices(self) -> tuple[str, ...]:
        """Keys that were set and have no effect, one sentence each, for the engine to log once."""
        return tuple(find_notices(self))


def _checked_values(raw: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    problems = Problems()
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        problems.fault("world_size", "a whole number >= 1", world_size, "Pass the number of ranks.")
        problems.raise_if_any()
    tree = canonical_tree(raw, problems)
    take_features(tree, problems)
    elsewhere = {key: path for key, path in paths_of(Settings) if "." in path}
    drop_unknown(tree, Settings, elsewhere, problems)
    _check_auto(tree, problems)
    problems_in_triangle = any(fault.startswith(_TRIANGLE) for fault in problems.faults)
    values = _validated(tree, problems)
    if not problems_in_triangle:
        values.update(complete_triangle(tree, world_size, problems))
    refuse_keys(values, problems)
    _check_together(values, world_size, problems)
    problems.raise_if_any()
    return values


def _check_auto(tree: Tree, problems: Problems) -> None:
    left = drop_auto(tree)
    if left:
        problems.fault(
            ", ".join(left),
            "a value",
            "auto",
            'Only transformers and accelerate fill in "auto"; write a value, or leave the key out.',
        )


def _validated(tree: Tree, problems: Problems) -> dict[str, Any]:
    """Validate all keys but the triangle; a top-level key that fails is reported and left out."""
    corners = dict.fromkeys(_TRIANGLE, 1)
    try:
        settings = Settings.model_validate({**tree, **corners})
    except ValidationError as error:
        problems.add_validation_error(error)
        failed = {item["loc"][0] for item in error.errors()}
        sound = {name: value for name, value in tree.items() if name not in failed}
        settings = Settings.model_validate({**sound, **corners})
    return {name: getattr(settings, name) for name in settings.model_fields_set if name not in _TRIANGLE}


def _check_together(values: Mapping[str, Any], world_size: int, problems: Problems) -> None:
    """Check keys that are sound alone but contradict one another."""
    fp16, bf16 = values.get("fp16"), values.get("bf16")
    if fp16 is not None and bf16 is not None and fp16.enabled and bf16.enabled:
        problems.fault(
            "fp16.enabled, bf16.enabled", "at most one to be true", "both", "Choose one precision."
        )
    check_forms(values, problems)
    data_parallel = values.get("data_parallel_size")
    if data_parallel not in (None, world_size):
        problems.fault(
            "data_parallel_size", f"the world size {world_size}", data_parallel, "Leave the key out."
        )
    optimizer = values.get("optimizer")
    if optimizer is not None and "max_grad_norm" in optimizer.params:
        problems.fault(
            "optimizer.params.max_grad_norm",
            "no such parameter",
            optimizer.params["max_grad_norm"],
            "Set the top-level key gradient_clipping instead.",
        )
