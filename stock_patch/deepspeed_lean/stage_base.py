"""What the replacements in stock's ZeRO optimizers share."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .host_memory import HostMemory
from .log import log
from .op_builder import CPUAdamBuilder
from .ring import StagingRing
from .shapes import Shape

_SLOT_NBYTES = 8 << 20  # a tile of 16-bit weights
_SLOTS = 3  # one is computed, one waits, one travels


# A mixin sees the attributes of stock's optimizer, into which it is mixed.
if TYPE_CHECKING:
    _Stocks = Any
else:
    _Stocks = object


class ZeroOptimizer(_Stocks):
    """Base of the mixins."""

    # Functions of stock's class that a mixin extends or replaces, and what it relies on in them.
    SHAPES: ClassVar[dict[str, Shape]] = {}


class Lean:
    """What one optimizer has beside stock's attributes.

    Args:
        pin: page-lock the ring.
        op: our compiled op, whatever stock's optimizer uses; None if it is not needed, or does not compile.
    """

    def __init__(self, pin: bool, op: Any) -> None:
        self.pin = pin
        self.op = op
        self.memory = HostMemory("DeepSpeedZeroOptimizer")
        self._ring: StagingRing | None = None

    def ring(self) -> StagingRing:
        """The staging ring, made at first use. Gradients pass it in backward, weights in step."""
        if self._ring is None:
            self._ring = StagingRing(_SLOT_NBYTES, self.pin, self.memory.ledger, _SLOTS)
            weakref.finalize(self, self._ring.close).atexit = False
        return self._ring

    def close(self) -> None:
        """Return the ring's memory."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None


class Stage12(ZeroOptimizer):
    """Stages 1 and 2: knows whether the optimizer is on the host, and holds what the mixins share.

    Stock pins masters, gradients and copies when `pin_memory` is set. Here everything between device and host
    passes the ring, and only that is page-locked; what a switch leaves to stock is pinned as stock does.
    """

    SHAPES: ClassVar[dict[str, Shape]] = {
        "__init__": Shape(None, ("offload_optimizer_config", "cpu_offload", "cpu_offload_pin_memory")),
        "destroy": Shape(("self",)),
    }
    lean: Lean

    # Whether downloads and uploads pass the ring; set by the mixins that do it.
    downloads_through_ring = False
    uploads_through_ring = False

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        config: Any = kwargs.get("offload_optimizer_config")
        offloads = config is not None and config.device != "none"
        op = load_op() if offloads and self.downloads_through_ring else None
        self.lean = Lean(offloads and config.pin_memory, op)
        if offloads and self._all_through_ring(optimizer, kwargs):
            kwargs["offload_optimizer_config"] = config.model_copy(update={"pin_memory": False})
        super().__init__(optimizer, *args, **kwargs)

    def _all_through_ring(self, optimizer: Any, settings: dict[str, Any]) -> bool:
        """Whether stock copies nothing to or from masters and gradients, by its constructor's settings."""
        dtype = optimizer.param_groups[0]["params"][0].dtype
        stocks_ways = (
            settings.get("zenflow_config"),
            settings.get("fp16_master_weights_and_gradients"),
            settings.get("bf16_master_weights_and_gradients"),
            settings.get("gradient_accumulation_dtype", dtype) == torch.float32 != dtype,
        )
        replaced = self.downloads_through_ring and self.uploads_through_ring and adam_is_stocks(optimizer)
        return replaced and self.lean.op is not None and not any(stocks_ways)

    @property
    def on_host(self) -> bool:
        """Whether the fp32 masters are on the host."""
        return bool(self.cpu_offload) and not self.zenflow

    @property
    def has_device(self) -> bool:
        """Whether the parameters are elsewhere."""
        return bool(self.bit16_groups_flat[0].device.type == "cuda")

    def destroy(self) -> None:
        """As stock's; returns the ring too."""
        super().destroy()
        self.lean.close()


def load_op() -> Any:
    """Our op; None, with a warning that says why, where it does not compile."""
    try:
        return CPUAdamBuilder().load()
    except RuntimeError as error:
        log().warning("deepspeed_lean: what needs the op is left to stock: %s", error)
        return None


def adam_is_stocks(optimizer: Any) -> bool:
    """Whether an optimizer is exactly stock's DeepSpeedCPUAdam, whose op can be driven in parts."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return type(optimizer) is DeepSpeedCPUAdam


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that starts where the current one is."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
