"""What the operator is told by its environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

_PORT, _SEARCHES = ("port number", 65_535), ("number", 64)
"""What a number is, and the largest that it may be; the least is 1."""
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's settings.

    Attributes:
        worker_image: for plans that name none; empty where there is no default.
        namespaces: whose plans are worked on; empty: all.
        lease_namespace, lease_name: where the lease is held that lets one operator act at a time.
        identity: who holds it; two operators must never share one.
        concurrent_searches: how many plans' searches compute at a time, each on a core.
    """

    worker_image: str = ""
    namespaces: tuple[str, ...] = ()
    lease_namespace: str = "default"
    lease_name: str = "trainwright-operator"
    identity: str = "trainwright"
    metrics_port: int = 9090
    health_port: int = 8080
    log_level: str = "INFO"
    concurrent_searches: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """The settings that environment variables give. Raises ValueError with a sentence."""
        names = environment.get("TRAINWRIGHT_WATCH_NAMESPACES", "").split(",")
        return cls(
            worker_image=environment.get("TRAINWRIGHT_WORKER_IMAGE", ""),
            namespaces=tuple(dict.fromkeys(name.strip() for name in names if name.strip())),
            lease_namespace=environment.get("TRAINWRIGHT_LEASE_NAMESPACE", "default"),
            lease_name=environment.get("TRAINWRIGHT_LEASE_NAME") or "trainwright-operator",
            # A container that is started again gets the host name of its pod anew, and process numbers repeat there:
            # then it is the same holder, which is dead for certain, so the lease is its own at once.
            identity=f"{socket.gethostname()}_{os.getpid()}",
            metrics_port=_number(environment, "TRAINWRIGHT_METRICS_PORT", 9090, _PORT),
            health_port=_number(environment, "TRAINWRIGHT_HEALTH_PORT", 8080, _PORT),
            log_level=_log_level(environment.get("TRAINWRIGHT_LOG_LEVEL", "info")),
            concurrent_searches=_number(environment, "TRAINWRIGHT_CONCURRENT_SEARCHES", 1, _SEARCHES),
        )


def _log_level(text: str) -> str:
    if text.upper() not in _LOG_LEVELS:
        raise ValueError(f"TRAINWRIGHT_LOG_LEVEL must be one of {', '.join(_LOG_LEVELS).lower()}, got {text!r}")
    return text.upper()


def _number(environment: Mapping[str, str], name: str, default: int, kind: tuple[str, int]) -> int:
    text = environment.get(name, str(default))
    what, most = kind
    if not text.isdecimal() or not 0 < int(text) <= most:
        raise ValueError(f"{name} must be a {what} from 1 to {most}, got {text!r}")
    return int(text)
