"""Files that are complete or absent, and folders that change from one checkpoint to the next in one step.

A rank writes each file of a save under a temporary name beside its own and flushes it. When all ranks have
done so, a record in the tag's folder says that the save counts from now on; then the files are renamed, and
the record is removed. Whatever moment a kill falls on, a reader finds one complete checkpoint: before the
record, the files that stood there; after it, those of the record, under whichever of their two names.
`latest` changes last.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_RECORD = ".commit.json"
_TEMPORARY = re.compile(r"(?P<name>.+)\.(?P<save>[0-9a-f]{8})\.tmp")


def temporary_name(name: str, save_id: str) -> str:
    """Under which name a file is written."""
    return f"{name}.{save_id}.tmp"


@dataclass(frozen=True)
class TagFolder:
    """A tag's folder as a reader sees it.

    Args:
        path: the folder.
        save_id: of a save that counts but was interrupted while its files were renamed; None: there is none.
        names: the files of that save.
    """

    path: Path
    save_id: str | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: Path) -> TagFolder:
        """Look at a folder."""
        record = path / _RECORD
        if not record.is_file():
            return cls(path)
        content = json.loads(record.read_text())
        return cls(path, content["save_id"], tuple(content["names"]))

    def files(self) -> list[str]:
        """The names of the folder's checkpoint files, whether they have been renamed already or not."""
        if self.save_id is not None:
            return sorted(self.names)
        return sorted(entry.name for entry in os.scandir(self.path) if entry.name.endswith(".pt"))

    def locate(self, name: str) -> Path:
        """Where a file is; the path may not exist."""
        if self.save_id is not None:
            temporary = self.path / temporary_name(name, self.save_id)
            if temporary.exists():
                return temporary
        return self.path / name


def leftovers(folder: Path) -> Iterator[Path]:
    """Temporary files in a tag's folder that belong to no save that counts: an interrupted one left them."""
    if not folder.is_dir():
        return
    current = TagFolder.open(folder)
    for entry in os.scandir(folder):
        match = _TEMPORARY.fullmatch(entry.name)
        if match and match["save"] != current.save_id:
            yield Path(entry.path)


def write_record(folder: Path, save_id: str, names: Sequence[str]) -> None:
    """From here on the folder holds the new checkpoint."""
    replace_text(folder / _RECORD, json.dumps({"save_id": save_id, "names": list(names)}))


def remove_record(folder: Path) -> None:
    """All files have their own names: the record has done its work."""
    (folder / _RECORD).unlink(missing_ok=True)
    sync_folder(folder)


def rename_temporary(folder: Path, names: Sequence[str], save_id: str) -> None:
    """Give files their own names; nothing to do for those that have them already."""
    for name in names:
        temporary = folder / temporary_name(name, save_id)
        if temporary.exists():
            os.replace(temporary, folder / name)


def replace_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a small file: the old content or the new one is there at any moment."""
    temporary = path.with_name(temporary_name(path.name, f"{os.getpid() & 0xFFFFFFFF:08x}"))
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(temporary, mode)
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk, where the file system can."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        pass  # some network file systems do not flush folders; their renames are durable by themselves
    finally:
        os.close(fd)
