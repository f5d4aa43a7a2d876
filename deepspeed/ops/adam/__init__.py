"""Adam and AdamW: on the host by the compiled op, on any device by torch's fused kernel."""

from .cpu_adam import DeepSpeedCPUAdam
from .fused_adam import FusedAdam
from .host_threads import host_threads

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "host_threads"]
