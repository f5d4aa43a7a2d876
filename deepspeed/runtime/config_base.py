"""What every section of the DeepSpeed JSON is made of: the frozen base model and the field types.

Field names are the JSON's own, except where the JSON counts elements under the name "size": those are called
``*_numel`` in Python and keep their JSON name as alias.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

DTYPE_NAMES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


class Section(BaseModel):
    """One JSON object of the configuration: immutable, and without room for keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


def expected(constraint: str, advice: str = "") -> PydanticCustomError:
    """Build the validator error that is reported as ``<key>: expected <constraint>, got <value>. <advice>``.

    Args:
        constraint: What the value has to be.
        advice: One sentence on what to do; empty for the general one.
    """
    return PydanticCustomError("expected", "{constraint}", {"constraint": constraint, "advice": advice})


def _number_not_bool(value: Any) -> Any:
    if isinstance(value, (bool, str)):
        raise expected("a number")
    return value


def _dtype(value: Any) -> torch.dtype | None:
    if value is None or (isinstance(value, torch.dtype) and value in DTYPE_NAMES.values()):
        return value
    name = str(value).lower().removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise expected('one of "fp32", "fp16", "bf16"')
    return DTYPE_NAMES[name]


PositiveCount = Annotated[int, BeforeValidator(_number_not_bool), Field(gt=0)]
Count = Annotated[int, BeforeValidator(_number_not_bool), Field(ge=0)]
PositiveNumber = Annotated[float, BeforeValidator(_number_not_bool), Field(gt=0, allow_inf_nan=False)]
NonNegativeNumber = Annotated[float, BeforeValidator(_number_not_bool), Field(ge=0, allow_inf_nan=False)]
OptionalDtype = Annotated[torch.dtype | None, BeforeValidator(_dtype)]
