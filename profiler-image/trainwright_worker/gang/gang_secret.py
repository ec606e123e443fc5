"""Secret that the pods of a gang share: what their store holds of a failure is signed with it.

Whoever reaches the store can read and write it, but without the secret neither forge a message nor find the keys that the
gang's messages have.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from trainwright.worker_api import SECRET_FILE


class ForgedMessageError(RuntimeError):
    """Message that somebody without the gang's secret wrote."""


@dataclass(frozen=True, slots=True)
class GangSecret:
    """Secret of a gang; an empty one proves nothing."""

    key: bytes = field(repr=False)

    @classmethod
    def beside(cls, task_path: Path) -> GangSecret:
        """Return the secret in the folder of the task; empty where an operator of a former version stored none."""
        path = task_path.with_name(SECRET_FILE)
        return cls(path.read_bytes() if path.exists() else b"")

    @classmethod
    def new(cls) -> GangSecret:
        """Return a random secret."""
        return cls(secrets.token_bytes())

    def sign(self, topic: str, text: str) -> str:
        """Return the text with a signature (HMAC-SHA256, RFC 2104) in front, valid for that topic only."""
        return f"{self.digest(topic, text)} {text}"

    def verify(self, topic: str, message: bytes) -> str:
        """Return the text of a signed message. Raise ForgedMessageError if the signature is another one."""
        signature, _, text = message.decode(errors="replace").partition(" ")
        if not hmac.compare_digest(signature.encode(), self.digest(topic, text).encode()):
            raise ForgedMessageError(f"{topic}: the message is not signed with the gang's secret")
        return text

    def digest(self, topic: str, text: str = "") -> str:
        """Return what only holders of the secret can compute for the topic and text, as 64 hexadecimal digits."""
        return hmac.new(self.key, f"{topic}\n{text}".encode(), hashlib.sha256).hexdigest()
