"""NVMe offload is not here; its builder's name answers availability checks."""

from ..op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
