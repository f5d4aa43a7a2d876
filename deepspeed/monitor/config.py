"""The monitors' sections of the configuration, by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.config_base import Section
from deepspeed.runtime.config_sections import TensorBoardConfig, WandbConfig

__all__ = ["DeepSpeedMonitorConfig", "get_monitor_config"]


class DeepSpeedMonitorConfig(Section):
    """Which monitors are on, and where each writes."""

    tensorboard: TensorBoardConfig = TensorBoardConfig()
    wandb: WandbConfig = WandbConfig()
    csv_monitor: TensorBoardConfig = TensorBoardConfig()


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Return the monitors' part of a configuration, for a script that reports numbers of its own.

    Args:
        param_dict: The DeepSpeed configuration as a mapping.
    """
    names = DeepSpeedMonitorConfig.model_fields
    return DeepSpeedMonitorConfig(**{name: param_dict[name] for name in names if name in param_dict})
