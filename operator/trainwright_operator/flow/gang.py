"""A gang: pods that start together, as PyTorchJobs of one pod shape each, and which pod belongs on which node."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from trainwright.orders import Gang, GangNode, WorkerOrder
from trainwright_operator.api import API_VERSION, KIND
from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.flow import pod_template
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.names import (
    GANG_LABEL,
    PLAN_LABEL,
    PLAN_UID_LABEL,
    RENDEZVOUS_LABEL,
    Names,
)
from trainwright_operator.flow.snapshot import PlanFacts, PodFacts, StoredMap

MASTER: Final = "master"
_ABANDONED_SECONDS = 28 * 24 * 3600
"""Jobs end by themselves this long after the operator would have ended them: only where it is gone for good.

A job's deadline stays as it was when the job was made, and counts on while its pods are gated and while the operator is
away. So it lies beyond all deadlines that an edit may give (each at most a week) and beyond any absence. What an
uninstalled operator leaves behind waits at no cost until then: gated pods hold no devices, and workers that run end by
themselves at their order's deadline. Only pods that were sent to their nodes and never started hold devices so long;
they go with their TrainingPlan."""


@dataclass(frozen=True, slots=True)
class WantedGang:
    """A gang that a phase wants to have run.

    Attributes:
        pending_seconds: how long it may wait for devices, image and pods' start.
        run_seconds: how long it may run from the start of its last pod.
        deadline_seconds: how long both together may take; None where the two above say all.
        parts: of a series: the name that each plan's result is kept under, the gang's own among them.
    """

    name: str
    order: WorkerOrder
    pending_seconds: float
    run_seconds: float
    deadline_seconds: float | None = None
    parts: tuple[str, ...] = ()

    @property
    def results(self) -> tuple[str, ...]:
        """The names that its results are kept under."""
        return self.parts or (self.name,)


@dataclass(frozen=True, slots=True)
class Shape:
    """The nodes of a gang whose pods look alike: one PyTorchJob, its Master on the first of them."""

    job: str
    devices: int
    nodes: tuple[GangNode, ...]


def gangs_of_series(stored: Iterable[StoredMap]) -> frozenset[str]:
    """The gangs among these ConfigMaps' whose order is a series; an order that cannot be read is none."""
    orders = (one for one in stored if one.role == StoredRole.ORDER)
    return frozenset(one.gang for one in orders if _kind(one.data.get(pod_template.ORDER_FILE, "")) == "series")


def _kind(order: str) -> object:
    try:
        document = json.loads(order)
    except (ValueError, RecursionError):
        return None
    return document.get("kind") if isinstance(document, dict) else None


def shapes(names: Names, gang_name: str, gang: Gang) -> tuple[Shape, ...]:
    """The gang's PyTorchJobs. The gang's first node comes first, so its Master hosts the rendezvous."""
    by_devices: dict[int, list[GangNode]] = {}
    for node in gang.nodes:
        by_devices.setdefault(len(node.slots), []).append(node)
    return tuple(
        Shape(names.job(gang_name, number), devices, tuple(nodes))
        for number, (devices, nodes) in enumerate(by_devices.items())
    )


def node_of(shape: Shape, pod: PodFacts) -> GangNode | None:
    """The node that a pod belongs on; None for a pod that the job should not have."""
    place = pod.index if pod.role == MASTER else pod.index + 1
    return shape.nodes[place] if 0 <= place < len(shape.nodes) else None


def owner_reference(plan: PlanFacts) -> dict[str, Any]:
    """What makes Kubernetes delete a child with its plan. It must not block the plan's deletion."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": plan.name,
        "uid": plan.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def labels(plan: PlanFacts, gang_name: str = "") -> dict[str, str]:
    """Labels of a child."""
    own = {
        "app.kubernetes.io/managed-by": "trainwright",
        PLAN_LABEL: plan.name[:63].rstrip("-."),
        PLAN_UID_LABEL: plan.uid,
    }
    return own | {GANG_LABEL: gang_name} if gang_name else own


def manifests(plan: PlanFacts, spec: TrainingPlanSpec, names: Names, wanted: WantedGang) -> tuple[dict[str, Any], ...]:
    """The gang's PyTorchJobs as plain data."""
    gang_shapes = shapes(names, wanted.name, wanted.order.gang)
    master = f"{gang_shapes[0].job}-{MASTER}-0"
    return tuple(
        _manifest(plan, spec, names, wanted, shape, master=master, is_first=number == 0)
        for number, shape in enumerate(gang_shapes)
    )


def _manifest(  # noqa: PLR0913
    plan: PlanFacts,
    spec: TrainingPlanSpec,
    names: Names,
    wanted: WantedGang,
    shape: Shape,
    *,
    master: str,
    is_first: bool,
) -> dict[str, Any]:
    own_labels = labels(plan, wanted.name)
    rendezvous = {RENDEZVOUS_LABEL: "true"} if is_first else {}

    def replicas(count: int, further: dict[str, str]) -> dict[str, Any]:
        return {
            "replicas": count,
            "restartPolicy": "Never",
            "template": pod_template.render(
                image=plan.image,
                master=master,
                order_map=names.order(wanted.name),
                resource_name=spec.devices.resource_name,
                devices=shape.devices,
                labels=own_labels | further,
                template=spec.worker.pod_template,
            ),
        }

    replica_specs = {"Master": replicas(1, rendezvous)}
    if len(shape.nodes) > 1:
        replica_specs["Worker"] = replicas(len(shape.nodes) - 1, {})
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {
            "name": shape.job,
            "namespace": plan.namespace,
            "labels": own_labels,
            "ownerReferences": [owner_reference(plan)],
        },
        "spec": {
            # An integer, since `auto` counts as one process; no elasticPolicy, since it would scramble the ranks.
            "nprocPerNode": str(shape.devices),
            "runPolicy": {
                # Pods stay until their last words are read, and go when the operator then deletes the job: with
                # `Running`, the first pod that lost a peer would end the job, and that peer before it could say why.
                # No backoffLimit for the same reason: restartPolicy Never already ends the job at its first failure,
                # but with a limit the training operator deletes failed pods too. Should there be no operator, workers
                # end by themselves at their order's deadline.
                "cleanPodPolicy": "None",
                "activeDeadlineSeconds": int(wanted.pending_seconds + wanted.run_seconds + _ABANDONED_SECONDS),
            },
            "pytorchReplicaSpecs": replica_specs,
        },
    }
