"""What a monitor is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = ["Event", "Monitor"]

Event = tuple[str, Any, int]  # name such as "Train/Samples/lr", value, samples so far


class Monitor(ABC):
    """Something that events are written to.

    Args:
        monitor_config: its section of the configuration.
    """

    def __init__(self, monitor_config: Any) -> None:
        self.enabled: bool = monitor_config.enabled

    @abstractmethod
    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write events.

        Args:
            event_list: `(name, value, samples)` each; a value may be a tensor of one element.
        """
