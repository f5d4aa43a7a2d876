"""What the rank server imports once for all ranks.

The package's import has no side effects, so forking after it is safe.
"""

import contextlib

with contextlib.suppress(ImportError):
    import deepspeed  # noqa: F401
