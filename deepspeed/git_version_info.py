"""Version facts under the path that clients of DeepSpeed read.

``version`` is the package version; ``git_hash`` and ``git_branch`` are "unknown", as in any wheel built
outside a checkout.
"""

from deepspeed.version import __version__

version: str = __version__
git_hash: str = "unknown"
git_branch: str = "unknown"
