"""Builders of the compiled ops.

Where the files live: this package is `op_builder/` at the root of a checkout, the sources are `csrc/` beside
it. `deepspeed/ops/op_builder` and `deepspeed/ops/csrc` are symbolic links to them, and real folders inside a
wheel, so that a builder always finds the sources as `../csrc` from its own folder. `setup.py` lists
`deepspeed.ops.op_builder` as a package and `deepspeed/ops/csrc/**` as package data, and takes prebuilt
extensions from `CPUAdamBuilder().builder()` when the environment variable `DS_BUILD_CPU_ADAM` is 1.

Importing this package needs neither torch nor deepspeed: pip's isolated build has neither.
"""

from .async_io import AsyncIOBuilder
from .builder import OpBuilder
from .cpu_adam import CPUAdamBuilder

__all__ = ["ALL_BUILDERS", "AsyncIOBuilder", "CPUAdamBuilder", "OpBuilder"]

ALL_BUILDERS: tuple[type[OpBuilder], ...] = (AsyncIOBuilder, CPUAdamBuilder)
