"""Files that commands read documents from."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainwright import documents

MAX_DOCUMENT_BYTES: Final = 64 * 2**20
STANDARD_INPUT: Final = Path("-")


def read(path: Path, noun: Any, *, absent: Mapping[str, Any] | None = None) -> Any:
    """Read a noun; `absent` gives the fields that the file lacks. Raises DocumentError with one sentence."""
    return documents.loads_given(content_of(path), noun, source=str(path), absent=absent)


def content_of(path: Path) -> bytes:
    """Read a file, or standard input for `-`, of at most MAX_DOCUMENT_BYTES. Raises DocumentError with one sentence."""
    try:
        if path == STANDARD_INPUT:
            content = sys.stdin.buffer.read(MAX_DOCUMENT_BYTES + 1)
        else:
            with path.open("rb") as file:
                content = file.read(MAX_DOCUMENT_BYTES + 1)
    except (OSError, ValueError) as error:
        raise documents.DocumentError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MAX_DOCUMENT_BYTES:
        raise documents.DocumentError(f"{path}: larger than {MAX_DOCUMENT_BYTES} bytes; give a smaller document")
    return content
