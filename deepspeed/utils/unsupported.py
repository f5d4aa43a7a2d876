"""One way to refuse: a name that imports, and an error that says what to do when it is used."""

from __future__ import annotations

from typing import Any, NoReturn


def refuse(name: str, feature: str, instead: str) -> NoReturn:
    """Raise for a feature that DeepSpeed has and this package has not.

    Args:
        name: What the caller used.
        feature: What it belongs to.
        instead: A sentence on what to do.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        f"{name}: expected a feature of this package, got {feature}, which is not here. {instead}"
    )


class Unsupported:
    """Base of classes that clients import and that cannot be made."""

    feature = ""
    instead = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError."""
        refuse(type(self).__name__, self.feature, self.instead)
