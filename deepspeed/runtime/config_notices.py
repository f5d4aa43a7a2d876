"""Keys that are accepted and have no effect here: told once instead of ignored in silence."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.config_settings import Settings
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

# Top-level key: why nothing happens, or what to do instead. A key that gets implemented loses its row.
WITHOUT_EFFECT = {
    "log_level": "Call deepspeed.utils.logger.setLevel.",
    "disable_python_gc": "Call gc.disable() in the training script.",
}


def find_notices(config: Settings) -> Iterator[str]:
    """Yield one sentence or two for each key that was set to something and does nothing.

    Args:
        config: A valid configuration.
    """
    for name, reason in WITHOUT_EFFECT.items():
        if getattr(config, name) != Settings.model_fields[name].default:
            yield f"{name} has no effect here. {reason}"
    yield from _offload_notices(config)
    checkpointing = config.activation_checkpointing
    switches = ("partition_activations", "contiguous_memory_optimization", "cpu_checkpointing")
    on = [name for name in switches if getattr(checkpointing, name)]
    if on:
        yield (
            f"activation_checkpointing.{', '.join(on)} has an effect only in a model that calls "
            "deepspeed.checkpointing; torch.utils.checkpoint does not read it."
        )


def _offload_notices(config: Settings) -> Iterator[str]:
    zero = config.zero_optimization
    offload, offload_param = zero.offload_optimizer, zero.offload_param
    if offload is not None and offload.device is OffloadDeviceEnum.cpu and zero.stage == 0:
        yield "zero_optimization.offload_optimizer has no effect at stage 0. Use stage 1 or 2 to offload."
    if offload_param is not None and offload_param.device is OffloadDeviceEnum.cpu:
        yield "zero_optimization.offload_param has no effect below stage 3: parameters stay on the device."
