"""Which environment variables go along to the other hosts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from deepspeed.utils.logging import logger

__all__ = ["ENVIRONMENT_NAME", "exported_environment"]

# Clients write environment for remote hosts to a file of this name in the working directory.
ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")

_PREFIXES = ("MLFLOW", "MV2", "NCCL", "PYTHON", "UCX")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def exported_environment(env: Mapping[str, str], folders: list[Path]) -> dict[str, str]:
    """Return the variables that every host gets.

    Args:
        env: This process's environment; what belongs to Python, NCCL, UCX, MVAPICH and MLflow goes along.
        folders: Where to look for the environment file; a later one wins. The last is the working directory,
            which leads PYTHONPATH.

    Source: prefixes, file and PYTHONPATH as DeepSpeed 0.19.8 exports them. A line that is no KEY=VALUE is an
    error there; here it is told and left out, since accelerate writes values of several lines.
    """
    exports = {name: value for name, value in sorted(env.items()) if name.startswith(_PREFIXES)}
    path = [str(folders[-1]), *filter(None, [env.get("PYTHONPATH")])]
    exports["PYTHONPATH"] = os.pathsep.join(path)
    for folder in folders:
        exports.update(_read(folder / ENVIRONMENT_NAME))
    return exports


def _read(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    logger.info("environment for all hosts: %s", path)
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if equals and _VARIABLE.fullmatch(name.strip()):
            found[name.strip()] = value
        else:
            logger.warning("%s: expected KEY=VALUE in line %d, got %.40r. Left out.", path, number, line)
    return found
