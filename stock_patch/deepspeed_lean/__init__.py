"""Stock DeepSpeed with the optimizer on the host at 16 bytes a parameter: parts of it replaced as it runs.

`apply()` replaces, `revert()` undoes; nothing happens at import. Engines that exist keep what they were made
with.
"""

from __future__ import annotations

SWITCHES = ("host_buffers", "adam_op", "unscale", "staging", "accumulator", "temporary", "pinning")

__all__ = ["SWITCHES", "applied", "apply", "revert"]


def apply(**switches: bool) -> tuple[str, ...]:
    """Replace parts of the stock DeepSpeed of this process, for engines that are made from now on.

    A part whose shape is not the known one keeps stock's own, with a warning; so do all on a release other
    than 0.19. Called again, it first undoes what the call before did.

    Args:
        switches: False for a part to leave as it is; see `SWITCHES`. DEEPSPEED_LEAN_OFF, a list of names
            with commas, does the same from outside.

    Returns:
        Names of the parts that are replaced now.

    Raises:
        ValueError: a name that is no switch.
        ImportError: there is no DeepSpeed.
    """
    from . import patching

    return patching.apply(switches)


def revert() -> None:
    """Put back everything that `apply` replaced."""
    from . import patching

    patching.revert()


def applied() -> tuple[str, ...]:
    """Names of the parts that are replaced now."""
    from . import patching

    return patching.applied()
