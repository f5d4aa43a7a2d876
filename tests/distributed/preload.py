"""What the rank server imports once for all ranks; the package has no import-time side effects, so forking after it is safe."""

import contextlib

# A torch optimizer imports it at its first use: seconds a rank, unless the server has it.
import torch._dynamo  # noqa: F401

with contextlib.suppress(ImportError):
    import deepspeed  # noqa: F401
