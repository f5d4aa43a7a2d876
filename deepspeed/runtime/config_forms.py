"""Smaller forms of optimizer state and gradients: stock's keys and ours, and where they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from deepspeed.runtime.config_problems import Problems
from deepspeed.runtime.config_settings import Settings
from deepspeed.runtime.zero.forms import MasterForm, MomentForm, StateForms

_OFFLOAD = "zero_optimization.offload_optimizer"
_NEEDS_OFFLOAD = f'Set zero_optimization.stage to 1 or 2 and {_OFFLOAD}.device to "cpu".'


def state_forms(settings: Settings) -> StateForms:
    """What is kept in which form, whoever's key asks for it."""
    offload = settings.zero_optimization.offload_optimizer
    if offload is None or not settings.zero_optimization.offloads_optimizer:
        return StateForms()
    master, moments = offload.master_weights, offload.optimizer_states
    if settings.bf16.bf16_master_weights_and_grads:
        master = MasterForm.bf16_residual
    if settings.bf16.bf16_optimizer_states and moments is MomentForm.fp32:
        moments = MomentForm.bf16
    return StateForms(master, moments, offload.optimizer_states_seed)


def accumulation_dtype(settings: Settings) -> torch.dtype | None:
    """In which type micro-batches are added, if a key says so."""
    if settings.data_types.grad_accum_dtype is None and settings.bf16.bf16_master_weights_and_grads:
        return torch.bfloat16
    return settings.data_types.grad_accum_dtype


def check_forms(values: Mapping[str, Any], problems: Problems) -> None:
    """Report forms that cannot hold under the other settings.

    Args:
        values: top-level key to validated section; keys that failed validation are absent.
        problems: collects the faults.
    """
    settings = Settings.model_construct(**values)
    offloads = settings.zero_optimization.offloads_optimizer
    for path, neutral, value in _asked(settings):
        if not offloads:
            problems.fault(path, f"{neutral} without optimizer offload", value, _NEEDS_OFFLOAD)
        elif path.startswith("bf16.") and not settings.bf16.enabled:
            problems.fault(
                path, f"{neutral} unless bf16.enabled", value, "Enable bf16, or leave the key out."
            )
    forms = state_forms(settings)
    if forms.master is MasterForm.bf16_residual and not settings.bf16.enabled:
        problems.fault(
            f"{_OFFLOAD}.master_weights",
            '"fp32" unless bf16.enabled',
            forms.master.value,
            "Only a bf16 weight is the upper half of its fp32 master; fp16 has another exponent.",
        )
    if forms.master is MasterForm.bf16_residual and settings.checkpoint.async_save:
        problems.fault(
            "checkpoint.async_save",
            f'false with {_OFFLOAD}.master_weights "bf16_residual"',
            True,
            "Half of the master is the device's weight, which training goes on to change.",
        )


def _asked(settings: Settings) -> Iterator[tuple[str, str, Any]]:
    """Keys that ask for a smaller form: path, the value that does not, the value."""
    offload = settings.zero_optimization.offload_optimizer
    for name in ("master_weights", "optimizer_states"):
        form = getattr(offload, name, MasterForm.fp32)
        if form.value != "fp32":
            yield f"{_OFFLOAD}.{name}", '"fp32"', form.value
    for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        if getattr(settings.bf16, name):
            yield f"bf16.{name}", "false", True
