"""What the operator is told by its environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's settings.

    Attributes:
        worker_image: for plans that name none; empty where there is no default.
        namespaces: whose plans are worked on; empty: all.
        lease_namespace: where the lease is held that lets one operator act at a time.
        identity: who holds it; two operators must never share one.
    """

    worker_image: str = ""
    namespaces: tuple[str, ...] = ()
    lease_namespace: str = "default"
    identity: str = "trainwright"
    metrics_port: int = 9090
    health_port: int = 8080

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """The settings that environment variables give. Raises ValueError with a sentence."""
        names = environment.get("TRAINWRIGHT_WATCH_NAMESPACES", "").split(",")
        return cls(
            worker_image=environment.get("TRAINWRIGHT_WORKER_IMAGE", ""),
            namespaces=tuple(dict.fromkeys(name.strip() for name in names if name.strip())),
            lease_namespace=environment.get("TRAINWRIGHT_LEASE_NAMESPACE", "default"),
            # A container that is started again gets the host name of its pod anew, and process numbers repeat there:
            # then it is the same holder, which is dead for certain, so the lease is its own at once.
            identity=f"{socket.gethostname()}_{os.getpid()}",
            metrics_port=_port(environment, "TRAINWRIGHT_METRICS_PORT", 9090),
            health_port=_port(environment, "TRAINWRIGHT_HEALTH_PORT", 8080),
        )


def _port(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal() or not 0 < int(text) < 65_536:
        raise ValueError(f"{name} must be a port number from 1 to 65535, got {text!r}")
    return int(text)
