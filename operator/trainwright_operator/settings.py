"""Settings of the operator from environment variables."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainwright_operator.api.installation import (
    Handover,
    HandoverRule,
    InstallationRules,
    PodTemplateRule,
    TenantLimits,
)
from trainwright_operator.api.pods import ARCHITECTURES

_PORT, _SEARCHES = ("port number", 65_535), ("number", 64)
"""Name and maximum of a number; its minimum is 1."""
_MIN_GRACE_SECONDS = 5
"""What workers have of their own."""
_HIGHEST_LIMIT = 1_000_000_000
_MAX_HOURS = 87_600
"""Ten years."""
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
SYSTEM_NAMESPACES = ("kube-system", "kube-public", "kube-node-lease")
"""Namespaces of Kubernetes itself, whose TrainingPlans are left alone."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the operator.

    Attributes:
        worker_image: default image of plans without one; may be empty.
        namespaces: watched namespaces; empty: all.
        lease_namespace, lease_name: location of the lease for a single active operator.
        identity: holder of the lease, unique for each operator.
        concurrent_searches: number of plans searched at a time, each on one core.
        rules: what the chart's values let plans do.
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
    rules: InstallationRules = field(default_factory=InstallationRules)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings from environment variables. Raise ValueError if one is invalid."""
        return cls(
            worker_image=environment.get("TRAINWRIGHT_WORKER_IMAGE", ""),
            namespaces=_namespaces(environment.get("TRAINWRIGHT_WATCH_NAMESPACES", "")),
            lease_namespace=environment.get("TRAINWRIGHT_LEASE_NAMESPACE", "default"),
            lease_name=environment.get("TRAINWRIGHT_LEASE_NAME") or "trainwright-operator",
            # A restarted container keeps its pod's host name, and process numbers repeat: it is then the same holder
            # and gets the lease at once.
            identity=f"{socket.gethostname()}_{os.getpid()}",
            metrics_port=_number(environment, "TRAINWRIGHT_METRICS_PORT", 9090, _PORT),
            health_port=_number(environment, "TRAINWRIGHT_HEALTH_PORT", 8080, _PORT),
            log_level=_log_level(environment.get("TRAINWRIGHT_LOG_LEVEL", "info")),
            concurrent_searches=_number(environment, "TRAINWRIGHT_CONCURRENT_SEARCHES", 1, _SEARCHES),
            rules=_rules(environment),
        )


def _rules(environment: Mapping[str, str]) -> InstallationRules:
    return InstallationRules(
        isolates_gangs=_one_of(environment, "TRAINWRIGHT_NETWORK_POLICY", ("true", "false")) == "true",
        pod_template=PodTemplateRule(_one_of(environment, "TRAINWRIGHT_ALLOW_POD_TEMPLATE", tuple(PodTemplateRule))),
        limits=TenantLimits(
            priority=_limit(environment, "TRAINWRIGHT_MAX_PRIORITY", 0),
            plans_per_namespace=_limit(environment, "TRAINWRIGHT_PLANS_PER_NAMESPACE", 1),
            grace_seconds=_limit(environment, "TRAINWRIGHT_MAX_GRACE_SECONDS", _MIN_GRACE_SECONDS),
        ),
        architectures=_architectures(environment.get("TRAINWRIGHT_WORKER_ARCHITECTURES", "")),
        priority_class=environment.get("TRAINWRIGHT_WORKER_PRIORITY_CLASS", ""),
        handover=Handover(
            HandoverRule(_one_of(environment, "TRAINWRIGHT_HANDOVER", tuple(HandoverRule))),
            _hours(environment, "TRAINWRIGHT_HANDOVER_MAX_HOURS"),
        ),
    )


def _architectures(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in ARCHITECTURES:
            raise ValueError(
                f"TRAINWRIGHT_WORKER_ARCHITECTURES must name some of {', '.join(ARCHITECTURES)}, with commas, got {name!r}"
            )
    return names


def _namespaces(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name in SYSTEM_NAMESPACES:
            raise ValueError(
                f"TRAINWRIGHT_WATCH_NAMESPACES must not name Kubernetes' own namespaces, got {name!r}; use another one"
            )
    return names


def _log_level(text: str) -> str:
    if text.upper() not in _LOG_LEVELS:
        raise ValueError(f"TRAINWRIGHT_LOG_LEVEL must be one of {', '.join(_LOG_LEVELS).lower()}, got {text!r}")
    return text.upper()


def _one_of(environment: Mapping[str, str], name: str, values: Sequence[str]) -> str:
    """Return the variable's value; without one, the first."""
    text = environment.get(name) or values[0]
    if text not in values:
        raise ValueError(f"{name} must be one of {', '.join(values)}, got {text!r}")
    return text


def _hours(environment: Mapping[str, str], name: str) -> float | None:
    """Return the variable's value; None without one."""
    text = environment.get(name, "")
    if not text:
        return None
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not 0 < hours <= _MAX_HOURS:
        raise ValueError(f"{name} must be a number of hours above 0, at most {_MAX_HOURS}, got {text!r}")
    return hours


def _number(environment: Mapping[str, str], name: str, default: int, kind: tuple[str, int]) -> int:
    text = environment.get(name, str(default))
    what, most = kind
    if not text.isdecimal() or not 0 < int(text) <= most:
        raise ValueError(f"{name} must be a {what} from 1 to {most}, got {text!r}")
    return int(text)


def _limit(environment: Mapping[str, str], name: str, least: int) -> int | None:
    """Return the variable's value, or None where it is empty."""
    text = environment.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or not least <= int(text) <= _HIGHEST_LIMIT:
        raise ValueError(
            f"{name} must be a number from {least} to {_HIGHEST_LIMIT}, or empty for no limit, got {text!r}"
        )
    return int(text)
