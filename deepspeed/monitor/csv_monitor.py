"""Events as CSV files, one for each name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed.monitor.base import Event, Monitor

__all__ = ["csvMonitor"]


class csvMonitor(Monitor):
    """Appends each event to `<output_path>/<job_name>/<name, "/" as "_">.csv`: samples, value.

    Args:
        csv_config: the section `csv_monitor`; without an output path the working directory.

    Source: names of class and files, and the header, as DeepSpeed 0.19.8 writes them. There each run writes
    the header again; here a file has one.
    """

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config)
        self.log_dir = Path(csv_config.output_path) / csv_config.job_name
        self.log_dir.mkdir(parents=True, exist_ok=True)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Append events to their files.

        Args:
            event_list: `(name, value, samples)` each.
        """
        for name, value, samples in event_list:
            path = self.log_dir / f"{name.replace('/', '_')}.csv"
            header = "" if path.exists() else f"step,{name.rpartition('/')[2]}\n"
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{header}{samples},{float(value)!r}\n")
