"""Everything that is wrong with a configuration, collected so that one error tells all of it."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

GENERAL_ADVICE = "Correct the value, or leave the key out for its default."

_CONSTRAINTS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "string": "a string",
    "finite_number": "a finite number",
    "dict": "a JSON object",
    "model": "a JSON object",
    "list": "a list",
}
_BOUNDS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}


class DeepSpeedConfigError(ValueError):
    """A configuration that cannot be used. Lists every problem found, one a line."""


@dataclass
class Problems:
    """Faults (wrong keys and values) and refusals (what DeepSpeed has and this package has not)."""

    faults: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def fault(self, key: str, constraint: str, value: object, advice: str = GENERAL_ADVICE) -> None:
        """Add ``<key>: expected <constraint>, got <value>. <advice>``."""
        self.faults.append(f"{key}: expected {constraint}, got {_shown(value)}. {advice or GENERAL_ADVICE}")

    def refuse(self, key: str, constraint: str, value: object, advice: str) -> None:
        """Add a refusal in the same form."""
        self.refusals.append(f"{key}: expected {constraint}, got {_shown(value)}. {advice}")

    def unknown_key(self, path: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> None:
        """Add an unknown key, naming the nearest known one.

        Args:
            path: Full dotted path of the key.
            known: Keys that its section knows.
            elsewhere: Key name to full path, for every key of the configuration.
        """
        section, _, name = path.rpartition(".")
        near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
        if name in elsewhere:
            hint = f"This key belongs at {elsewhere[name]!r}."
        elif near:
            hint = f"Did you mean {_join(section, near[0])!r}?"
        else:
            near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
            hint = f"The nearest known key is {_join(section, near[0])!r}; remove {path!r} if it is not that."
        self.faults.append(f"{path}: expected a known key, got an unknown one. {hint}")

    def add_validation_error(self, error: ValidationError, prefix: str = "") -> None:
        """Translate pydantic's findings, except unknown keys, which are found before."""
        for item in error.errors(include_url=False):
            path = _join(prefix, ".".join(str(part) for part in item["loc"]))
            if item["type"] == "missing":
                self.faults.append(
                    f"{path}: expected a value, got nothing. Add the key, or leave out its section."
                )
                continue
            advice = str(item.get("ctx", {}).get("advice", ""))
            self.fault(path, _constraint(item), item.get("input"), advice)

    def raise_if_any(self) -> None:
        """Raise one error that lists every problem.

        Raises:
            DeepSpeedConfigError: There are faults; refusals are listed with them.
            NotImplementedError: There are only refusals.
        """
        lines = self.faults + self.refusals
        if not lines:
            return
        heading = "" if len(lines) == 1 else f"DeepSpeed config: {len(lines)} problems\n  "
        text = heading + "\n  ".join(lines)
        if self.faults:
            raise DeepSpeedConfigError(text)
        raise NotImplementedError(text)


def _shown(value: object) -> str:
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    return short.repr(value)


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _constraint(item: Mapping[str, Any]) -> str:
    kind = item["type"]
    context = item.get("ctx", {})
    if kind == "expected":
        return str(context["constraint"])
    if kind in _BOUNDS:
        name, sign = _BOUNDS[kind]
        return f"a number {sign} {float(context[name]):g}"
    if kind in ("enum", "literal_error"):
        return f"one of {context['expected']}"
    return _CONSTRAINTS.get(kind) or _CONSTRAINTS.get(kind.partition("_")[0]) or item["msg"]
