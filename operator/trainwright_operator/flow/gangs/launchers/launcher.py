"""Launcher of a gang: what the flow needs to know of a kind of object that creates pods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from trainwright.worker_api import Gang, GangNode, TrialTask
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.gangs import pod_template
from trainwright_operator.flow.gangs.child_metadata import child_labels, owner_reference, plan_annotations
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.worker_image import image_of_task
from trainwright_operator.flow.names import LOG_LABEL, Names
from trainwright_operator.flow.nodes.network_devices import Amounts
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.snapshot import PodFacts

ABANDONED_SECONDS: Final = 28 * 24 * 3600
"""Grace period after the operator's own deadlines until a job ends itself, for an operator that is gone for good.

A job's deadline is fixed at its creation and counts while its pods are gated and the operator is down, so it exceeds
all deadlines that an edit may set (each at most a week) and any absence. Until then gated pods hold no devices, and
running workers end at their task's deadline; only pinned pods that never started hold devices, until their
TrainingPlan is deleted.
"""


class JobApi(NamedTuple):
    """Group, version and plural under which the API server serves a kind of object."""

    group: str
    version: str
    plural: str


@dataclass(frozen=True, slots=True)
class PodPlace:
    """Place of a pod in its gang, as its labels tell it.

    Attributes:
        job: name of the object that it belongs to.
        role: group of equal pods in that object.
        index: number in the group, from 0.
    """

    job: str
    role: str
    index: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Job that the winner becomes.

    Attributes:
        owners: its owner references; none where it is the user's.
        ends_after_seconds: time after which it ends itself, should nobody end it before; None: never.
        nodes: with a pod on each, the first of which hosts the rendezvous.
        pod: template of the pod on a node, given the address of the first pod.
    """

    name: str
    namespace: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    nodes: tuple[GangNode, ...]
    pod: Callable[[GangNode, str], dict[str, Any]]
    suspended: bool
    owners: tuple[Mapping[str, Any], ...] = ()
    ends_after_seconds: int | None = None

    @property
    def deadline(self) -> dict[str, int]:
        """Return the field of a Job, and of a PyTorchJob's run policy, that ends it."""
        return {} if self.ends_after_seconds is None else {"activeDeadlineSeconds": self.ends_after_seconds}

    def manifest(self, api: JobApi, kind: LauncherKind, number: int, spec: dict[str, Any]) -> dict[str, Any]:
        """Return the object with that number."""
        metadata = {
            "name": f"{self.name}-{number}" if number else self.name,
            "namespace": self.namespace,
            "labels": dict(self.labels),
            "annotations": dict(self.annotations),
            **({"ownerReferences": [dict(owner) for owner in self.owners]} if self.owners else {}),
        }
        return {"apiVersion": f"{api.group}/{api.version}", "kind": kind.value, "metadata": metadata, "spec": spec}


class Launcher(Protocol):
    """Kind of object that a gang's pods are created from.

    Attributes:
        missing: reason of a plan that waits for the kind's definition.
    """

    @property
    def kind(self) -> str: ...
    @property
    def missing(self) -> Reason: ...

    def places(self, names: Names, gang_name: str, gang: Gang) -> tuple[tuple[PodPlace, GangNode], ...]:
        """Return each pod's place with its node, in the order of jobs; the first pod hosts the rendezvous."""

    def manifests(self, context: ReconcileContext, gang_spec: GangSpec) -> tuple[dict[str, Any], ...]:
        """Return the gang's objects as plain data."""

    def pods(self, manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the pod templates of one of the objects."""

    def pod_owner(self, place: PodPlace) -> tuple[str, str]:
        """Return kind and name of the object that owns the pod in a place."""


class JobLauncher(Launcher, Protocol):
    """Launcher of objects of Kubernetes.

    Attributes:
        succeeded_condition: type of the condition of an object whose pods all succeeded; that of a failure is `Failed`.
    """

    @property
    def kind(self) -> LauncherKind: ...
    @property
    def api(self) -> JobApi: ...
    @property
    def succeeded_condition(self) -> str: ...

    def handed_over(self, job: HandedOver) -> tuple[dict[str, Any], ...]:
        """Return the objects of a job of the user's as plain data."""

    def read_place(self, labels: Mapping[str, str]) -> PodPlace | None:
        """Return a pod's place by its labels, or None where another launcher created it."""


def assigned_pods(
    places: Iterable[tuple[PodPlace, GangNode]], gang_pods: Iterable[PodFacts]
) -> tuple[tuple[PodFacts | None, GangNode], ...]:
    """Return each expected pod (None where missing) with its node, in the order of the places.

    Of several in a place the first counts: a JobSet's later ones replace it where it failed.
    """
    pods = {}
    for pod in sorted(gang_pods, key=lambda pod: pod.created_at, reverse=True):
        if not pod.terminating:
            pods[PodPlace(pod.job, pod.role, pod.index)] = pod
    return tuple((pods.get(place), node) for place, node in places)


def job_metadata(context: ReconcileContext, gang_spec: GangSpec, name: str) -> dict[str, Any]:
    """Return the metadata of an object of the gang."""
    return {
        "name": name,
        "namespace": context.plan.namespace,
        "labels": child_labels(context.plan, gang_spec.name),
        "annotations": plan_annotations(context.plan),
        "ownerReferences": [owner_reference(context.plan)],
    }


def pod_of(  # noqa: PLR0913 - each is a different fact of the pod
    context: ReconcileContext,
    gang_spec: GangSpec,
    *,
    master: str,
    devices: int,
    network: Amounts,
    labels: Mapping[str, str],
) -> dict[str, Any]:
    """Return the template of the gang's pods on nodes with that many devices: of our worker, or of the user's job.

    `network`: its network devices.
    """
    spec, framework = context.spec, gang_spec.framework
    own, template, container = dict[str, str](), spec.worker.pod_template, pod_template.worker_container(master)
    if framework is not None:
        own, template = {LOG_LABEL: "true"}, pod_template.template_of_job(framework, spec.worker.pod_template)
        task = gang_spec.task
        iterations = task.warmup_iterations + task.iterations if isinstance(task, TrialTask) else None
        container = pod_template.job_container(framework, master, iterations)
    rendered = pod_template.render(
        image=image_of_task(context, gang_spec.name),
        task_map=context.names.task(gang_spec.name),
        resource_name=spec.devices.resource_name,
        devices=devices,
        network=network,
        labels={**child_labels(context.plan, gang_spec.name), **own, **labels},
        template=template,
        container=container,
    )
    rendered["metadata"]["annotations"] |= plan_annotations(context.plan)
    priority_class = context.snapshot.rules.priority_class
    if priority_class and not rendered["spec"].get("priorityClassName"):
        rendered["spec"]["priorityClassName"] = priority_class
    return rendered


def abandoned_seconds(gang_spec: GangSpec) -> int:
    """Return the deadline after which an object ends itself."""
    return int(gang_spec.pending_seconds + gang_spec.run_seconds + ABANDONED_SECONDS)
