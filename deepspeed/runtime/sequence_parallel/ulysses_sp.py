"""Ulysses sequence parallelism, by name only: clients import these when their own option asks for it."""

from __future__ import annotations

from typing import Any, NoReturn

from deepspeed.utils.unsupported import Unsupported, refuse

__all__ = ["TiledMLP", "UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"]

_FEATURE = "Ulysses sequence parallelism"
_INSTEAD = "Set the client's sequence-parallel size to 1."


class UlyssesSPAttentionHF(Unsupported):
    """Attention over sequences split across ranks."""

    feature = _FEATURE
    instead = _INSTEAD

    @classmethod
    def register_with_transformers(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse. Raises: NotImplementedError."""
        refuse("UlyssesSPAttentionHF.register_with_transformers", _FEATURE, _INSTEAD)


class UlyssesSPDataLoaderAdapter(Unsupported):
    """A data loader that splits sequences across ranks."""

    feature = _FEATURE
    instead = _INSTEAD


class TiledMLP(Unsupported):
    """An MLP computed in tiles of the sequence."""

    feature = "tiled computation"
    instead = "Use activation checkpointing, or compile the module."

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse. Raises: NotImplementedError."""
        refuse("TiledMLP.apply", cls.feature, cls.instead)
