"""Where things are in the API."""

from __future__ import annotations

from trainwright_operator.api import GROUP, PLURAL, VERSION


def plans(namespace: str = "") -> str:
    """TrainingPlans of one namespace, or of all."""
    return f"/apis/{GROUP}/{VERSION}/{_in(namespace)}{PLURAL}"


def plan(namespace: str, name: str) -> str:
    return f"{plans(namespace)}/{name}"


def jobs(namespace: str) -> str:
    return f"/apis/kubeflow.org/v1/{_in(namespace)}pytorchjobs"


def core(kind: str, namespace: str = "") -> str:
    """Pods, ConfigMaps, Events or Nodes."""
    return f"/api/v1/{_in(namespace)}{kind}"


def leases(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/{_in(namespace)}leases"


RESOURCE_SLICES = "/apis/resource.k8s.io/v1/resourceslices"


def _in(namespace: str) -> str:
    return f"namespaces/{namespace}/" if namespace else ""
