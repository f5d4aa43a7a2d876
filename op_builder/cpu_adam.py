"""Builder of the host optimizer op, csrc/adam."""

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
        "adam/cpu_adam.cpp",
        "adam/dispatch.cpp",
        "adam/kernels_avx2.cpp",
        "adam/kernels_avx512.cpp",
        "adam/kernels_neon.cpp",
        "adam/kernels_scalar.cpp",
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
