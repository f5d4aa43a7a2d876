"""What the rank server imports once for all ranks.

The package's import has no side effects, so forking after it is safe. What is set here every rank inherits.
"""

import contextlib

# torch's optimizers import it when the first one is made: 1.7 s of processor time in every rank.
import torch._dynamo  # noqa: F401

from tests.square_root import round_correctly

with contextlib.suppress(ImportError):
    import deepspeed  # noqa: F401

round_correctly()
