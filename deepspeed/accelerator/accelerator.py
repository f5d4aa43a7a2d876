"""``get_accelerator()``: a thin view of torch's device module (torch.cuda, torch.xpu, ...) or of the CPU.

Which device it is gets decided at the first call, by what torch finds; ``DS_ACCELERATOR`` (for example "cpu")
overrides it. Nothing is initialized before a method that needs the device is called.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import psutil
import torch

_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "hpu": "hccl", "npu": "hccl"}


class Accelerator:
    """One kind of device. Methods keep DeepSpeed's names and delegate to torch; sizes are bytes."""

    def __init__(self, device_type: str) -> None:
        """Bind to a kind of device.

        Args:
            device_type: torch's name of it, such as "cuda".
        """
        self._type = device_type

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self._type)

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cuda", or "cuda:1" for an index."""
        return self._type if device_index is None else f"{self._type}:{device_index}"

    def current_device(self) -> int:
        """Return the index of the current device."""
        return int(self._module.current_device())

    def current_device_name(self) -> str:
        """Return the current device with its index, such as "cuda:0"."""
        return self.device_name(self.current_device())

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """Return a context manager that selects a device."""
        context: AbstractContextManager[Any] = self._module.device(device_index)
        return context

    def set_device(self, device_index: int) -> None:
        """Make a device the current one."""
        self._module.set_device(device_index)

    def device_count(self) -> int:
        """Return the number of devices."""
        return int(self._module.device_count())

    def is_available(self) -> bool:
        """Return whether a device is there."""
        return bool(self._module.is_available())

    def communication_backend_name(self) -> str:
        """Return the torch.distributed backend for this device's tensors."""
        return _BACKENDS.get(self._type, "gloo")

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for all work on a device."""
        self._module.synchronize(device_index)

    def is_synchronized_device(self) -> bool:
        """Return whether operations finish before the call returns."""
        return False

    def is_bf16_supported(self) -> bool:
        """Return whether bfloat16 arithmetic works."""
        check = getattr(self._module, "is_bf16_supported", None)
        return bool(check()) if check is not None else True

    def is_fp16_supported(self) -> bool:
        """Return whether float16 arithmetic works."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the floating dtypes that weights may have."""
        halves = [torch.float16] if self.is_fp16_supported() else []
        return [torch.float32, *halves, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes held by tensors on a device."""
        return int(self._module.memory_allocated(device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the most bytes held by tensors so far."""
        return int(self._module.max_memory_allocated(device_index))

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Return the bytes held by torch's caching allocator."""
        return int(self._module.memory_reserved(device_index))

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Return the most bytes held by torch's caching allocator so far."""
        return int(self._module.max_memory_reserved(device_index))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Start the peaks anew."""
        self._module.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Return a device's memory."""
        return int(self._module.get_device_properties(device_index or self.current_device()).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes that can still be allocated on a device."""
        return int(self._module.mem_get_info(device_index)[0])

    def empty_cache(self) -> None:
        """Return unused cached memory to the device."""
        self._module.empty_cache()

    def current_stream(self, device_index: int | None = None) -> Any:
        """Return the current stream, or None where there are none."""
        return self._module.current_stream(device_index)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context manager that selects a stream."""
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""
        self._module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed every device's generator."""
        self._module.manual_seed_all(seed)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lives on this kind of device."""
        return tensor.device.type == self._type

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return a page-locked copy of a CPU tensor; ``align_bytes`` is there for the signature."""
        return tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is page-locked."""
        return tensor.is_pinned()


class CpuAccelerator(Accelerator):
    """The CPU as the device: one device, no streams, memory is the process's resident set."""

    def __init__(self) -> None:
        """Bind to the CPU."""
        super().__init__("cpu")

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cpu", whatever the index."""
        return "cpu"

    def current_device(self) -> int:
        """Return 0."""
        return 0

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """Return a context manager that does nothing."""
        return nullcontext()

    def set_device(self, device_index: int) -> None:
        """Do nothing."""

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def is_available(self) -> bool:
        """Return True."""
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: operations are finished when they return."""

    def is_synchronized_device(self) -> bool:
        """Return True."""
        return True

    def is_bf16_supported(self) -> bool:
        """Return True: torch computes bfloat16 on every CPU."""
        return True

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the resident set of this process in bytes."""
        return int(psutil.Process().memory_info().rss)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the resident set; its peak is reported by see_memory_usage."""
        return self.memory_allocated()

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Return the resident set: the CPU has no caching allocator."""
        return self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Return the resident set."""
        return self.memory_allocated()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Do nothing."""

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the machine's memory."""
        return int(psutil.virtual_memory().total)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the machine's available memory."""
        return int(psutil.virtual_memory().available)

    def empty_cache(self) -> None:
        """Do nothing."""

    def current_stream(self, device_index: int | None = None) -> Any:
        """Return None."""
        return None

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context manager that does nothing."""
        return nullcontext()

    def manual_seed(self, seed: int) -> None:
        """Seed torch's CPU generator."""
        torch.default_generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's CPU generator."""
        self.manual_seed(seed)

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return the tensor itself: there is no device to copy to."""
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return False."""
        return False


@lru_cache(maxsize=1)
def get_accelerator() -> Accelerator:
    """Return the accelerator of this process.

    Raises:
        ValueError: ``DS_ACCELERATOR`` names a device that torch does not have.
    """
    wanted = os.environ.get("DS_ACCELERATOR", "").lower()
    if wanted not in ("", "cpu"):
        try:
            available = bool(torch.get_device_module(wanted).is_available())
        except (RuntimeError, AttributeError):
            available = False
        if not available:
            raise ValueError(
                f"DS_ACCELERATOR: expected a device that torch has here, got {wanted!r}. "
                "Unset it, or use cpu."
            )
        return Accelerator(wanted)
    if wanted == "cpu" or not torch.accelerator.is_available():
        return CpuAccelerator()
    device = torch.accelerator.current_accelerator()
    return Accelerator(device.type) if device is not None else CpuAccelerator()
