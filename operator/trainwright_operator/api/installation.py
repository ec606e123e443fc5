"""Rules of an installation: what the chart's values let the plans of tenants do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

_MAX_NAMES: Final = 5
NO_JOBS: Final = "this installation hands over no jobs (handover.allow: Never of the chart)"


class PodTemplateRule(StrEnum):
    """Rule about what pod templates may ask for; each allows what those before it do.

    RESTRICTED: nothing that gives more than the worker's own pod. NAMESPACE: also what the pods of a namespace may use of
    it: Secrets, volume claims, service accounts. ANY: also what is the node's.
    """

    RESTRICTED = "Restricted"
    NAMESPACE = "Namespace"
    ANY = "Any"


def join_names(names: Sequence[str]) -> str:
    """Return names as words, only the first ones where there are many."""
    shown = [*names[:_MAX_NAMES], *([f"{len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else [])]
    return " and ".join(part for part in (", ".join(shown[:-1]), *shown[-1:]) if part)


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of tenants, the chart's `limits`; None: no limit.

    Attributes:
        priority: highest `spec.priority`.
        plans_per_namespace: plans of a namespace that are under way at a time.
        grace_seconds: highest terminationGracePeriodSeconds of a pod template.
    """

    priority: int | None = None
    plans_per_namespace: int | None = None
    grace_seconds: int | None = None

    def explain_priority(self, requested: int) -> str | None:
        """Return that a plan's priority is above the limit, and what to do, or None."""
        if self.priority is None or requested <= self.priority:
            return None
        return (
            f"spec.priority: has to be at most {self.priority}, got {requested}; lower it, or install the operator with a higher "
            "limits.maxPriority"
        )

    def explain_places(self, under_way: Sequence[str], ahead: int) -> str | None:
        """Return that no further plan of the namespace may be under way, and which are, or None.

        `ahead`: plans that wait for a place before this one.
        """
        most = self.plans_per_namespace
        if most is None or len(under_way) + ahead < most:
            return None
        others = f", and {ahead} {'plan waits' if ahead == 1 else 'plans wait'} before this one" if ahead else ""
        return (
            f"limits.plansPerNamespace of the installation is {most}, and {join_names(under_way) or 'no plan'} "
            f"{'is' if len(under_way) < 2 else 'are'} under way in this namespace{others}; wait until one of them ends, or "
            "suspend or delete one"
        )

    def is_too_long(self, grace_seconds: object) -> bool:
        """Return whether a pod would have more seconds of grace than the limit; the API server refuses other values."""
        limit = self.grace_seconds
        return limit is not None and isinstance(grace_seconds, int | float) and grace_seconds > limit


class HandoverRule(StrEnum):
    """Rule about the job that a winner becomes.

    FREE: nobody's but the user's, whatever becomes of the plan. OWNED: the plan's own, which ends with it. NEVER: none.
    """

    FREE = "Free"
    OWNED = "Owned"
    NEVER = "Never"


@dataclass(frozen=True, slots=True)
class Handover:
    """Rule about handing over, with the limit of the plans' own jobs.

    Attributes:
        max_hours: hours for which such a job may hold devices; None without a limit.
    """

    rule: HandoverRule = HandoverRule.FREE
    max_hours: float | None = None

    @property
    def max_seconds(self) -> float | None:
        return None if self.max_hours is None else self.max_hours * 3600


@dataclass(frozen=True, slots=True)
class InstallationRules:
    """Rules that hold for every plan.

    Attributes:
        isolates_gangs: whether gangs are isolated by NetworkPolicies.
        pod_template: what pod templates may ask for.
        limits: what tenants may ask for at most.
        architectures: what the installation's worker image is built for; empty: not told.
        priority_class: PriorityClass of gangs' pods whose template names none; empty: the cluster's default.
        handover: what becomes of winners with `spec.apply`.
    """

    isolates_gangs: bool = True
    pod_template: PodTemplateRule = PodTemplateRule.RESTRICTED
    limits: TenantLimits = field(default_factory=TenantLimits)
    architectures: tuple[str, ...] = ()
    priority_class: str = ""
    handover: Handover = field(default_factory=Handover)
