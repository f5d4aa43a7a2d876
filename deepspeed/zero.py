"""``deepspeed.zero``: ZeRO-3's public names; runtime/zero/partition_parameters.py says what they do here."""

from deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    register_external_parameter,
)

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"]
