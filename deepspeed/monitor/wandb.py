"""Events for Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.monitor.base import Event, Monitor

__all__ = ["WandbMonitor"]


class WandbMonitor(Monitor):
    """Logs to the run of this process, or begins one.

    Args:
        wandb_config: the section `wandb`: project, team and group of a new run.
    """

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config)
        import wandb

        self._wandb = wandb
        if wandb.run is None:
            wandb.init(project=wandb_config.project, entity=wandb_config.team, group=wandb_config.group)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Log values, those of the same samples together.

        Args:
            event_list: `(name, value, samples)` each.
        """
        steps: dict[int, dict[str, float]] = {}
        for name, value, samples in event_list:
            steps.setdefault(samples, {})[name] = float(value)
        for samples, values in steps.items():
            self._wandb.log(values, step=samples)
