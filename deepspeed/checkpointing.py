"""``deepspeed.checkpointing``: activation checkpointing."""

from deepspeed.runtime.activation_checkpointing.checkpointing import (
    checkpoint,
    configure,
    is_configured,
    reset,
)

__all__ = ["checkpoint", "configure", "is_configured", "reset"]
