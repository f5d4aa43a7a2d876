"""Builder of the host optimizer op, csrc/adam."""

import os
from types import ModuleType

from .builder import OpBuilder


class CPUAdamBuilder(OpBuilder):
    """The fused host kernels: Adam step, gradient accumulation, sum of squares.

    Needs a C++17 compiler and ninja; never CUDA. One binary holds every vector level of the architecture and
    picks one when loaded, so a cache or a wheel may be shared by nodes with different processors.
    """

    NAME = "cpu_adam"
    BUILD_VAR = "DS_BUILD_CPU_ADAM"
    PREBUILT = "deepspeed.ops.adam.cpu_adam_op"
    SOURCES = (
        "adam/adam_queue.cpp",
        "adam/cpu_adam.cpp",
        "adam/dispatch.cpp",
        "adam/kernels_avx2.cpp",
        "adam/kernels_avx512.cpp",
        "adam/kernels_neon.cpp",
        "adam/kernels_scalar.cpp",
        "adam/rollback.cpp",
    )

    def cxx_args(self) -> list[str]:
        """Returns compiler flags.

        No fast-math and no contraction: every vector level computes the same bits. No processor flags: each
        kernel file switches its own instruction set on. gcc 12 warns falsely about its own AVX-512 header.
        """
        return [
            "-O3",
            "-g0",
            "-fopenmp",
            "-fvisibility=hidden",
            "-ffp-contract=off",
            "-fno-math-errno",
            "-Wno-maybe-uninitialized",
        ]

    def ld_args(self) -> list[str]:
        """Returns linker flags."""
        return ["-fopenmp"]

    def load(self, verbose: bool = False) -> ModuleType:
        """Returns the op: compiled, or in plain torch if DS_CPU_ADAM=torch asks for that.

        Args:
            verbose: show the compiler's output.

        Raises:
            RuntimeError: the op does not compile here; the message holds the compiler's first error.
            ValueError: DS_CPU_ADAM is neither unset nor "torch".
        """
        choice = os.environ.get("DS_CPU_ADAM", "")
        if choice == "torch":
            from . import torch_adam

            return torch_adam
        if choice:
            raise ValueError(f"DS_CPU_ADAM: expected torch or nothing, got {choice!r}. Correct or unset it.")
        try:
            return super().load(verbose)
        except RuntimeError as error:
            raise RuntimeError(
                f"{error} Or set DS_CPU_ADAM=torch: the same steps without a compiler, several times slower."
            ) from None
