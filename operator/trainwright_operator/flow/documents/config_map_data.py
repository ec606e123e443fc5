"""Content of a ConfigMap, compressed where it is a page or more text than a ConfigMap holds.

`document.json` is then `document.json.gz` in `binaryData`. Those that pods mount as files are never compressed.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from trainwright_operator.flow.actions import CreateConfigMap, StoredRole

MAX_BYTES: Final = 1_000_000
"""Limit of our own, below that of a ConfigMap (1 MiB)."""
MAX_TEXT_BYTES: Final = 64_000_000
"""Limit of a compressed text, since a few bytes can hold gigabytes."""
_SUFFIX: Final = ".gz"


@dataclass(frozen=True, slots=True)
class ConfigMapData:
    """Texts and compressed texts by key."""

    texts: Mapping[str, str]
    compressed: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, creation: CreateConfigMap) -> ConfigMapData:
        """Return what is stored, in the form that former versions read where it fits."""
        plain = cls(creation.data)
        is_small = plain.bytes <= MAX_BYTES and creation.role is not StoredRole.PAGE
        if is_small or creation.role in (StoredRole.TASK, StoredRole.HANDOVER):
            return plain
        return cls(
            {}, {f"{key}{_SUFFIX}": gzip.compress(text.encode(), mtime=0) for key, text in creation.data.items()}
        )

    @property
    def bytes(self) -> int:
        """Size as the API server counts it."""
        return sum(len(text.encode()) for text in self.texts.values()) + sum(map(len, self.compressed.values()))

    def read(self) -> dict[str, str]:
        """Return all texts; those that are damaged or too long are left out, as if they were removed."""
        texts = dict(self.texts)
        for key, compressed in self.compressed.items():
            text = _decompressed(compressed) if key.endswith(_SUFFIX) else None
            if text is not None:
                texts[key.removesuffix(_SUFFIX)] = text
        return texts


def _decompressed(compressed: bytes) -> str | None:
    reader = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # with gzip's header
    try:
        text = reader.decompress(compressed, MAX_TEXT_BYTES)
        return text.decode() if reader.eof else None
    except (zlib.error, UnicodeDecodeError):
        return None
