"""Events for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed.monitor.base import Event, Monitor

__all__ = ["TensorBoardMonitor"]


class TensorBoardMonitor(Monitor):
    """Writes scalars to `<output_path>/<job_name>/`, over samples.

    Args:
        tensorboard_config: the section `tensorboard`; without an output path the working directory.
    """

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config)
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(tensorboard_config.output_path) / tensorboard_config.job_name
        self.summary_writer = SummaryWriter(log_dir=str(folder))

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        """Write scalars.

        Args:
            event_list: `(name, value, samples)` each.
            flush: write them to the file now.
        """
        for name, value, samples in event_list:
            self.summary_writer.add_scalar(name, float(value), samples)
        if flush:
            self.summary_writer.flush()
