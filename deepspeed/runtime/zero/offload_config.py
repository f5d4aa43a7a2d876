"""``zero_optimization.offload_optimizer`` and ``offload_param``: where states live when not on the device."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from deepspeed.runtime.config_base import Count, NonNegativeNumber, Section, expected
from deepspeed.runtime.zero.forms import MasterForm, MomentForm


class OffloadDeviceEnum(str, Enum):
    """Places that an ``offload_*.device`` key can name. ``nvme`` is known only to be refused by name."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """States that ``offload_states(include=...)`` can name, under DeepSpeed's names."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def _device(value: Any) -> OffloadDeviceEnum:
    name = value.value if isinstance(value, OffloadDeviceEnum) else str(value).lower()
    if value is None or name not in OffloadDeviceEnum.__members__:
        raise expected('"none" or "cpu"', "The states of the optimizer live on the device or on the host.")
    return OffloadDeviceEnum(name)


def _one_of(choices: type[Enum]) -> Callable[[Any], Any]:
    """Takes a member of an enumeration, or its value in any letter case."""

    def choose(value: Any) -> Any:
        name = value.value if isinstance(value, choices) else str(value).lower()
        if name not in choices.__members__:
            raise expected(", ".join(f'"{member}"' for member in choices.__members__))
        return choices[name]

    return choose


OffloadDevice = Annotated[OffloadDeviceEnum, BeforeValidator(_device)]


class OffloadTarget(Section):
    """Keys that both offload sections share.

    device: "none" or "cpu", in any letter case.
    pin_memory: page-lock the staging buffers (never the states).
    nvme_path: would be read with device "nvme", which is refused; some clients always send it.
    """

    device: OffloadDevice = OffloadDeviceEnum.none
    pin_memory: bool = True
    nvme_path: str | None = None


class OffloadOptimizerConfig(OffloadTarget):
    """Optimizer offload: master weights, gradients and optimizer state on the host.

    ratio and super_offload are refused unless at their defaults. fast_init, pipeline_read, pipeline_write
    (NVMe) and cpuadam_cores_perc (SuperOffload) have no effect here.

    Keys of this package alone. master_weights: "fp32", or "bf16_residual": the same bits in 2 bytes less.
    optimizer_states: "fp32", "bf16" (rounded by chance) or "int8" (blocks of 256). optimizer_states_seed: of
    the chance.
    """

    buffer_count: Count = 4
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] = 1.0
    super_offload: bool = False
    master_weights: Annotated[MasterForm, BeforeValidator(_one_of(MasterForm))] = MasterForm.fp32
    optimizer_states: Annotated[MomentForm, BeforeValidator(_one_of(MomentForm))] = MomentForm.fp32
    optimizer_states_seed: Annotated[Count, Field(lt=1 << 63)] = 0
    cpuadam_cores_perc: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] = 0.8


class OffloadParamConfig(OffloadTarget):
    """Parameter offload: a stage-3 feature; below stage 3 it has no effect, in DeepSpeed too."""

    buffer_count: Count = 5
    buffer_size: NonNegativeNumber = 1e8
    max_in_cpu: NonNegativeNumber = 1e9
