"""Kueue's queue in the simulated cluster: admits a job once every group of its pods gets a flavor with enough quota."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainwright_operator.flow.snapshot import FlavorFacts, QueueFacts

PRODUCT = "nvidia.com/gpu.product"


def flavor(product: str, quota: int | None = None, **labels: str) -> FlavorFacts:
    """Return a flavor of one product, perhaps with further labels."""
    name = "-".join([product, *labels.values()])
    return FlavorFacts(name, {PRODUCT: product} | labels, quota)


def queue_of(*flavors: FlavorFacts) -> QueueFacts:
    return QueueFacts("research", flavors)


@dataclass
class SimulatedQueue:
    """Queue with its quota.

    Attributes:
        foreign: devices of each flavor that jobs outside of the simulation hold.
        held: devices of each flavor by job.
        assigned: flavor of each group of a job's pods.
    """

    facts: QueueFacts = field(default_factory=lambda: queue_of(flavor("emulated-v100"), flavor("emulated-t4")))
    foreign: Counter[str] = field(default_factory=Counter)
    held: dict[str, Counter[str]] = field(default_factory=dict)
    assigned: dict[tuple[str, str], FlavorFacts] = field(default_factory=dict)

    def admit(self, manifest: Mapping[str, Any]) -> str:
        """Take the quota of the whole job, or return what lacks."""
        name, taken = manifest["metadata"]["name"], Counter[str]()
        chosen: dict[tuple[str, str], FlavorFacts] = {}
        for group in manifest["spec"]["replicatedJobs"]:
            needed, rules = _devices(group), _rules(group)
            possible = [one for one in self.facts.flavors if _may_be(one, rules)]
            fits = [one for one in possible if self._left(one, taken) >= needed]
            if not fits:
                return f"insufficient quota for {needed} devices of {[one.name for one in possible]}"
            taken[fits[0].name] += needed
            chosen[name, group["name"]] = fits[0]
        self.held[name] = taken
        self.assigned |= chosen
        return ""

    def release(self, job: str) -> None:
        self.held.pop(job, None)

    def _left(self, one: FlavorFacts, taken: Counter[str]) -> float:
        used = taken[one.name] + self.foreign[one.name] + sum(held[one.name] for held in self.held.values())
        return float("inf") if one.quota is None else one.quota - used


def _pod(group: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = group["template"]["spec"]["template"]["spec"]
    return found


def _devices(group: Mapping[str, Any]) -> int:
    limits = _pod(group)["containers"][0]["resources"]["limits"]
    return int(group["template"]["spec"]["completions"] * int(limits["nvidia.com/gpu"]))


def _rules(group: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = _pod(group).get("affinity", {}).get("nodeAffinity", {}).get(required, {}).get("nodeSelectorTerms", [])
    return [rule for term in terms for rule in term.get("matchExpressions", [])]


def _may_be(one: FlavorFacts, rules: list[Mapping[str, Any]]) -> bool:
    """Return whether the flavor's labels agree with a group's affinity, which Kueue looks at only for labels of flavors."""
    assert all(rule["operator"] == "NotIn" for rule in rules)
    return all(one.node_labels.get(rule["key"]) not in rule["values"] for rule in rules)
