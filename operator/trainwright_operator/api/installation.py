"""Rules of an installation: what the chart's values let the plans of tenants do."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class PodTemplateRule(StrEnum):
    """Rule about what pod templates may ask for; each allows what those before it do.

    RESTRICTED: nothing that gives more than the worker's own pod. NAMESPACE: also what the pods of a namespace may use of
    it: Secrets, volume claims, service accounts. ANY: also what is the node's.
    """

    RESTRICTED = "Restricted"
    NAMESPACE = "Namespace"
    ANY = "Any"


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

    def explain_priority(self, asked: int) -> str | None:
        """Return that a plan's priority is above the limit, and what to do, or None."""
        if self.priority is None or asked <= self.priority:
            return None
        return (
            f"spec.priority: has to be at most {self.priority}, got {asked}; lower it, or install the operator with a higher "
            "limits.maxPriority"
        )

    def explain_grace(self, place: str, asked: object) -> str | None:
        """Return that seconds of grace are above the limit, and what to do, or None; `place`: their field."""
        if self.grace_seconds is None or not isinstance(asked, int | float) or asked <= self.grace_seconds:
            return None
        return (
            f"{place}: has to be at most {self.grace_seconds}, got {asked}; lower it, or install the operator with a higher "
            "limits.maxTerminationGracePeriodSeconds"
        )


@dataclass(frozen=True, slots=True)
class InstallationRules:
    """Rules that hold for every plan.

    Attributes:
        isolates_gangs: whether gangs are isolated by NetworkPolicies.
        pod_template: what pod templates may ask for.
        limits: what tenants may ask for at most.
        priority_class: PriorityClass of gangs' pods whose template names none; empty: the cluster's default.
    """

    isolates_gangs: bool = True
    pod_template: PodTemplateRule = PodTemplateRule.RESTRICTED
    limits: TenantLimits = field(default_factory=TenantLimits)
    priority_class: str = ""
