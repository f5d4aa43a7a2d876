"""One monitor for all: what is written to it goes to every one that is on."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from deepspeed.monitor.base import Event, Monitor
from deepspeed.monitor.csv_monitor import csvMonitor
from deepspeed.monitor.tensorboard import TensorBoardMonitor
from deepspeed.monitor.wandb import WandbMonitor
from deepspeed.utils.logging import rank_for_logging

__all__ = ["Event", "Monitor", "MonitorMaster"]


class MonitorMaster(Monitor):
    """Writes to every monitor that is switched on, from rank 0 only.

    Args:
        monitor_config: has the sections `tensorboard`, `wandb` and `csv_monitor`.

    Raises:
        RuntimeError: on every rank, if the package of one that is on is not installed.
    """

    def __init__(self, monitor_config: Any) -> None:
        self.tb_monitor: Monitor | None = None
        self.wandb_monitor: Monitor | None = None
        self.csv_monitor: Monitor | None = None
        for key in ("tensorboard", "wandb"):
            if getattr(monitor_config, key).enabled:
                _check_package(key)
        self.enabled = any(
            getattr(monitor_config, key).enabled for key in ("tensorboard", "wandb", "csv_monitor")
        )
        if rank_for_logging() == 0:
            self._open(monitor_config)

    def _open(self, config: Any) -> None:
        if config.tensorboard.enabled:
            self.tb_monitor = TensorBoardMonitor(config.tensorboard)
        if config.wandb.enabled:
            self.wandb_monitor = WandbMonitor(config.wandb)
        if config.csv_monitor.enabled:
            self.csv_monitor = csvMonitor(config.csv_monitor)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write events to every monitor; on other ranks than 0 nothing happens.

        Args:
            event_list: `(name, value, samples)` each.
        """
        for monitor in (self.tb_monitor, self.wandb_monitor, self.csv_monitor):
            if monitor is not None:
                monitor.write_events(event_list)


def _check_package(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise RuntimeError(
            f"{name}.enabled: expected the package {name!r} to be installed, got none. "
            f"Run: pip install {name}, or set {name}.enabled to false."
        )
