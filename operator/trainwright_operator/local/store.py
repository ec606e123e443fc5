"""ConfigMaps as files of a folder, one each, written whole or not at all."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Final

from trainwright_operator.flow.snapshot import StoredConfigMap

_PART: Final = ".part"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader, or this program after a crash, sees the old text or the new one."""
    part = path.with_name(f".{path.name}{_PART}")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


class FileStore:
    """ConfigMaps in a folder, which no other program writes meanwhile, or only rarely where `is_shared`."""

    def __init__(self, folder: Path, *, is_shared: bool = False) -> None:
        self._folder, self._is_shared = folder, is_shared
        folder.mkdir(parents=True, exist_ok=True)
        self._modified_ns = 0
        self._maps: dict[str, StoredConfigMap] = {}
        self._read()

    def all(self) -> tuple[StoredConfigMap, ...]:
        """Return what is stored, by name."""
        if self._is_shared and self._folder.stat().st_mtime_ns != self._modified_ns:
            self._read()
        return tuple(self._maps[name] for name in sorted(self._maps))

    def find(self, name: str) -> StoredConfigMap | None:
        """Return the ConfigMap of that name, or None."""
        return self._maps.get(name)

    def write(self, stored: StoredConfigMap) -> None:
        """Store a ConfigMap in the place of the one of its name."""
        text = json.dumps({**asdict(stored), "created_at": stored.created_at.isoformat()})
        write_whole(self._folder / f"{stored.name}.json", text)
        self._maps[stored.name] = stored

    def delete(self, name: str) -> None:
        """Delete the ConfigMap of that name, if there is one."""
        (self._folder / f"{name}.json").unlink(missing_ok=True)
        self._maps.pop(name, None)

    def _read(self) -> None:
        self._modified_ns = self._folder.stat().st_mtime_ns
        maps = (_parse(path) for path in self._folder.glob("*.json"))
        self._maps = {stored.name: stored for stored in maps if stored is not None}


def _parse(path: Path) -> StoredConfigMap | None:
    """Return a file's ConfigMap, or None where it is none: what it held is then made anew."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        stored = StoredConfigMap(**{**fields, "created_at": datetime.fromisoformat(fields["created_at"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return stored if stored.name == path.stem else None
