"""Tensor parallelism by injection, which is not here; ``layers`` holds the names that clients import."""

from deepspeed.module_inject import layers

__all__ = ["layers"]
