"""Elastic training, which is not here; the name that clients import."""

from __future__ import annotations

from typing import Any

from deepspeed.utils.unsupported import refuse

__all__ = ["compute_elastic_config"]


def compute_elastic_config(
    ds_config: dict[str, Any],
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> Any:
    """Refuse.

    Raises:
        NotImplementedError: Always.
    """
    refuse(
        "compute_elastic_config", "elastic batch sizes", "Set train_batch_size for the world that you start."
    )
