"""Build script: everything static is in pyproject.toml; here only what depends on the environment.

DS_BUILD_CPU_ADAM=1 compiles the CPU Adam op at install. That needs torch in the build environment, so it goes
with ``pip install --no-build-isolation``. Without it, the op compiles at first use.
"""

import os
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent


def prebuilt_ops() -> dict:
    """Return setup()'s arguments for the ops to compile now: none unless DS_BUILD_CPU_ADAM is 1."""
    if os.environ.get("DS_BUILD_CPU_ADAM", "0") != "1":
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension
    except ImportError as missing:
        raise RuntimeError(
            "DS_BUILD_CPU_ADAM: expected torch in the build environment, got none. "
            "Install torch first and add --no-build-isolation to the pip command."
        ) from missing
    sys.path.insert(0, str(ROOT))
    from op_builder import CPUAdamBuilder

    return {"ext_modules": [CPUAdamBuilder().builder()], "cmdclass": {"build_ext": BuildExtension}}


setup(**prebuilt_ops())
