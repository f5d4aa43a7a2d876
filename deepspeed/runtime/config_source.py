"""Where a configuration comes from: the argument that carries it, and the text that encodes it."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.runtime.config_problems import DeepSpeedConfigError

ConfigSource = Mapping[str, Any] | str | os.PathLike[str]


def choose_config(
    args: object = None, config: ConfigSource | None = None, config_params: ConfigSource | None = None
) -> ConfigSource:
    """Pick the configuration among the three places where ``deepspeed.initialize`` takes one.

    Args:
        args: Command-line arguments, an object or a mapping; its ``deepspeed_config`` is read.
        config: Mapping, path, JSON or base64 text.
        config_params: The same under DeepSpeed's older name.

    Returns:
        The one that was given.

    Raises:
        DeepSpeedConfigError: None was given, or several that differ.
    """
    from_args = (
        args.get("deepspeed_config") if isinstance(args, Mapping) else getattr(args, "deepspeed_config", None)
    )
    places = {"config": config, "config_params": config_params, "args.deepspeed_config": from_args}
    given = {name: source for name, source in places.items() if source is not None}
    if not given:
        raise DeepSpeedConfigError(
            "config: expected a mapping, a path or JSON text, got None. "
            "Pass config= to deepspeed.initialize, or --deepspeed_config on the command line."
        )
    sources = list(given.values())
    if any(source != sources[0] for source in sources[1:]):
        raise DeepSpeedConfigError(
            f"{' and '.join(given)}: expected one configuration, got {len(given)} that differ. Keep one."
        )
    return sources[0]


def read_config(source: ConfigSource) -> Mapping[str, Any]:
    """Return the mapping that a source stands for.

    Args:
        source: A mapping (returned as it is), the path of a JSON file, JSON text, or the same in base64.

    Raises:
        DeepSpeedConfigError: The source is none of these, is not valid JSON, or repeats a key.
    """
    if isinstance(source, Mapping):
        return source
    if isinstance(source, os.PathLike) or (isinstance(source, str) and not source.lstrip().startswith("{")):
        path = Path(source)
        if _is_file(path):
            return _parse(path.read_text(encoding="utf-8"), str(path))
        decoded = _from_base64(str(source))
        if decoded is not None:
            return _parse(decoded, "base64 text")
        raise DeepSpeedConfigError(
            f"config: expected an existing file, JSON text or base64 of it, got {str(source)!r}. "
            "Check the path; it is relative to the working directory of each rank."
        )
    if isinstance(source, str):
        return _parse(source, "JSON text")
    raise DeepSpeedConfigError(
        f"config: expected a mapping, a path or JSON text, got {type(source).__name__}. Pass one of these."
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # base64 text may be longer than a file name can be
        return False


def _from_base64(text: str) -> str | None:
    try:
        return base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, ValueError):
        return None


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _without_repeats(pairs, origin))
    except json.JSONDecodeError as error:
        raise DeepSpeedConfigError(
            f"config: expected valid JSON in {origin}, got: {error}. Correct the text."
        ) from None
    if not isinstance(value, dict):
        raise DeepSpeedConfigError(
            f"config: expected a JSON object in {origin}, got {value!r}. Wrap it in braces."
        )
    return value


def _without_repeats(pairs: list[tuple[str, Any]], origin: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise DeepSpeedConfigError(
                f"{key}: expected one value in {origin}, got {result[key]!r} and {value!r}. Remove one."
            )
        result[key] = value
    return result
