"""Lock that is free again when its process ends, however that ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self

_MAX_BYTES = 65_536


class FileLock:
    """Lock on a file, whose text its holder writes for whoever takes it next."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.is_held = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def take(self) -> bool:
        """Return whether this process holds the lock now."""
        if not self.is_held:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self.is_held = True
        return True

    def read(self) -> str:
        """Return the file's text."""
        return os.pread(self._file, _MAX_BYTES, 0).decode(errors="replace")

    def write(self, text: str) -> None:
        """Replace the file's text."""
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text.encode(), 0)
