"""PyTorchJobs of a gang, one for each job shape, and the node of each pod."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from trainwright.worker_api import Gang, GangNode, WorkerTask
from trainwright_operator.api import API_VERSION, KIND
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.gangs import pod_template
from trainwright_operator.flow.gangs.worker_image import image_of_task
from trainwright_operator.flow.names import (
    GANG_LABEL,
    PLAN_LABEL,
    PLAN_UID_LABEL,
    RENDEZVOUS_LABEL,
    Names,
)
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.snapshot import PlanFacts, PodFacts, StoredConfigMap

MASTER: Final = "master"
_ABANDONED_SECONDS = 28 * 24 * 3600
"""Grace period after the operator's own deadlines until a job ends itself, for an operator that is gone for good.

A job's deadline is fixed at its creation and counts while its pods are gated and the operator is down, so it exceeds
all deadlines that an edit may set (each at most a week) and any absence. Until then gated pods hold no devices, and
running workers end at their task's deadline; only pinned pods that never started hold devices, until their
TrainingPlan is deleted.
"""


@dataclass(frozen=True, slots=True)
class GangSpec:
    """Gang that a phase requests.

    Attributes:
        pending_seconds: limit on the pods' creation, and from their assignment to nodes to the start of the last one.
        run_seconds: limit on the run, from the start of the last pod.
        part_names: of a series, the result name of each trial, including the gang's own.
    """

    name: str
    task: WorkerTask
    pending_seconds: float
    run_seconds: float
    part_names: tuple[str, ...] = ()

    @property
    def result_names(self) -> tuple[str, ...]:
        """Return the names of the gang's stored results."""
        return self.part_names or (self.name,)


@dataclass(frozen=True, slots=True)
class JobShape:
    """Nodes of a gang with equal device counts: one PyTorchJob, with its Master on the first node."""

    job: str
    devices: int
    nodes: tuple[GangNode, ...]


def find_series_gangs(stored: Iterable[StoredConfigMap]) -> frozenset[str]:
    """Return the gangs whose stored task is a readable series."""
    tasks = (one for one in stored if one.role == StoredRole.TASK)
    return frozenset(one.gang for one in tasks if _kind(one.data.get(pod_template.TASK_FILE, "")) == "series")


def _kind(task: str) -> object:
    try:
        document = json.loads(task)
    except (ValueError, RecursionError):
        return None
    return document.get("kind") if isinstance(document, dict) else None


def job_shapes(names: Names, gang_name: str, gang: Gang) -> tuple[JobShape, ...]:
    """Return the gang's PyTorchJobs. The gang's first node comes first, so its Master hosts the rendezvous."""
    by_devices: dict[int, list[GangNode]] = {}
    for node in gang.nodes:
        by_devices.setdefault(len(node.slots), []).append(node)
    return tuple(
        JobShape(names.job(gang_name, number), devices, tuple(nodes))
        for number, (devices, nodes) in enumerate(by_devices.items())
    )


def assigned_pods(shape: JobShape, gang_pods: Iterable[PodFacts]) -> tuple[tuple[PodFacts | None, str], ...]:
    """Return each expected pod of the job (None where missing) with its node, in job order."""
    pods = {}
    for pod in gang_pods:
        place = pod.index if pod.role == MASTER else pod.index + 1
        if pod.job == shape.job and not pod.terminating and 0 <= place < len(shape.nodes):
            pods[shape.nodes[place].name] = pod
    return tuple((pods.get(node.name), node.name) for node in shape.nodes)


def owner_reference(plan: PlanFacts) -> dict[str, Any]:
    """Return the owner reference that deletes a child with its plan, without blocking the plan's deletion."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": plan.name,
        "uid": plan.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def child_labels(plan: PlanFacts, gang_name: str = "") -> dict[str, str]:
    own = {
        "app.kubernetes.io/managed-by": "trainwright",
        PLAN_LABEL: plan.name[:63].rstrip("-."),
        PLAN_UID_LABEL: plan.uid,
    }
    return own | {GANG_LABEL: gang_name} if gang_name else own


def manifests(context: ReconcileContext, gang_spec: GangSpec) -> tuple[dict[str, Any], ...]:
    """Return the gang's PyTorchJobs as plain data."""
    shapes = job_shapes(context.names, gang_spec.name, gang_spec.task.gang)
    return tuple(_manifest(context, gang_spec, shape, first_job=shapes[0].job) for shape in shapes)


def _manifest(context: ReconcileContext, gang_spec: GangSpec, shape: JobShape, *, first_job: str) -> dict[str, Any]:
    plan, spec = context.plan, context.spec
    own_labels = child_labels(plan, gang_spec.name)
    rendezvous = {RENDEZVOUS_LABEL: "true"} if shape.job == first_job else {}

    def replicas(count: int, further: dict[str, str]) -> dict[str, Any]:
        return {
            "replicas": count,
            "restartPolicy": "Never",
            "template": pod_template.render(
                image=image_of_task(context, gang_spec.name),
                master=f"{first_job}-{MASTER}-0",
                task_map=context.names.task(gang_spec.name),
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
            # An integer, because `auto` counts as one process; no elasticPolicy, because it would scramble the ranks.
            "nprocPerNode": str(shape.devices),
            "runPolicy": {
                # Pods stay until their termination messages are read; the operator then deletes the job. With
                # `Running`, the first pod that lost a peer would end the job before that peer reports its cause. No
                # backoffLimit: restartPolicy Never already ends the job at its first failure, but a limit makes the
                # training operator delete failed pods too. Without an operator, workers end at their task's deadline.
                "cleanPodPolicy": "None",
                "activeDeadlineSeconds": int(gang_spec.pending_seconds + gang_spec.run_seconds + _ABANDONED_SECONDS),
            },
            "pytorchReplicaSpecs": replica_specs,
        },
    }
