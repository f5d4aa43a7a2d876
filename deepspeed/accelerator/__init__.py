"""The device that training runs on, under DeepSpeed's method names."""

from deepspeed.accelerator.accelerator import Accelerator, CpuAccelerator, get_accelerator

__all__ = ["Accelerator", "CpuAccelerator", "get_accelerator"]
