"""The NVMe op of DeepSpeed: named, because clients ask whether it is there, and never there."""

from types import ModuleType

from .builder import OpBuilder


class AsyncIOBuilder(OpBuilder):
    """Answers availability checks of clients; there is no NVMe offload here."""

    NAME = "async_io"
    BUILD_VAR = "DS_BUILD_AIO"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Returns False: the op does not exist here."""
        return False

    def load(self, verbose: bool = False) -> ModuleType:
        """Raises NotImplementedError: the op does not exist here."""
        raise NotImplementedError(
            "async_io: expected no use of NVMe offload, got a request to load its op. "
            'Set the offload device to "cpu", or use DeepSpeed itself.'
        )
