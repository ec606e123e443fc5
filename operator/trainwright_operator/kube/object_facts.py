"""Conversion of API objects to the types of a snapshot, without control characters in any text."""

from __future__ import annotations

import logging
import sys
from base64 import b64decode
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from trainwright.outside.plain_text import without_controls
from trainwright_operator.api.quantities import parse_quantity
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.documents.config_map_data import ConfigMapData
from trainwright_operator.flow.gangs.kueue import QUEUE_LABEL
from trainwright_operator.flow.gangs.launchers.launcher import JobLauncher, PodPlace
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS
from trainwright_operator.flow.gangs.pod_template import CONTAINER
from trainwright_operator.flow.gangs.scheduling import pinned_node
from trainwright_operator.flow.names import (
    GANG_LABEL,
    HANDED_OVER_ANNOTATION,
    HANDED_OVER_LABEL,
    LOG_LABEL,
    PLAN_LABEL,
    PLAN_UID_LABEL,
    RENDEZVOUS_LABEL,
    ROLE_LABEL,
)
from trainwright_operator.flow.nodes.network_devices import asked_network_devices
from trainwright_operator.flow.nodes.published_devices import DeviceRequest
from trainwright_operator.flow.snapshot import (
    ContainerFacts,
    DeviceHolder,
    HandedOverObject,
    HolderKind,
    JobFacts,
    PlanFacts,
    PodFacts,
    StoredConfigMap,
)
from trainwright_operator.plan_resource import parse_time

logger = logging.getLogger(__name__)


def bare_plan_facts(resource: dict[str, Any]) -> PlanFacts:
    """Convert a TrainingPlan without reading its spec and status, which may be what breaks the reconciliation."""
    meta = resource["metadata"]
    return PlanFacts(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        generation=meta.get("generation", 1),
        created_at=datetime.now(UTC),
        spec=None,
        status=TrainingPlanStatus(),
        image="",
    )


def _optional_time(text: str | None) -> datetime | None:
    return parse_time(text) if text else None


def owner_uids(resource: dict[str, Any]) -> set[str]:
    """Return the uids of an object's owners, and of the plan that handed it over."""
    meta = resource["metadata"]
    handed_over = (meta.get("annotations") or {}).get(HANDED_OVER_ANNOTATION)
    return {owner["uid"] for owner in meta.get("ownerReferences") or []} | ({handed_over} if handed_over else set())


def is_owned_by(resource: dict[str, Any], uid: str) -> bool:
    """Return whether an object goes with the plan of that uid."""
    return any(owner["uid"] == uid for owner in resource["metadata"].get("ownerReferences") or [])


def is_of_plan(resource: dict[str, Any]) -> bool:
    """Return whether a job or ConfigMap belongs to the plan that its label tells, which copies of it do not."""
    return (resource["metadata"].get("labels") or {}).get(PLAN_UID_LABEL) in owner_uids(resource)


def is_of_gang(pod: dict[str, Any]) -> bool:
    """Return whether a pod was created from the gang's object that its labels tell.

    The uid of a JobSet's Job is not known here; a pod with a wrong one is deleted by Kubernetes' garbage collector.
    """
    meta = pod["metadata"]
    places = ((launcher, launcher.read_place(meta.get("labels") or {})) for launcher in LAUNCHERS.values())
    expected = {launcher.pod_owner(place) for launcher, place in places if place is not None}
    return any((owner["kind"], owner["name"]) in expected for owner in meta.get("ownerReferences") or [])


def job_facts(job: dict[str, Any], launcher: JobLauncher) -> JobFacts:
    meta, spec, states = job["metadata"], job.get("spec") or {}, (job.get("status") or {}).get("conditions") or []
    labels = meta.get("labels") or {}
    is_suspended = spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend")  # a JobSet's, a PyTorchJob's
    conditions = {c["type"]: c for c in states if c["status"] == "True"}
    resumed = (c.get("lastTransitionTime") for c in states if (c["type"], c["status"]) == ("Suspended", "False"))
    failed = conditions.get("Failed")
    has_ended = failed is not None or launcher.succeeded_condition in conditions
    facts = JobFacts(
        name=meta["name"],
        gang=labels.get(GANG_LABEL, ""),
        created_at=parse_time(meta["creationTimestamp"]),
        succeeded=launcher.succeeded_condition in conditions,
        failed_at=parse_time(failed.get("lastTransitionTime") or meta["creationTimestamp"]) if failed else None,
        message=(failed or {}).get("message", ""),
        terminating="deletionTimestamp" in meta,
        uid=meta.get("uid", ""),
        launcher=launcher.kind,
        queue=labels.get(QUEUE_LABEL, ""),
        suspended=bool(is_suspended) and not has_ended,
        resumed_at=_optional_time(next(resumed, None)),
    )
    return without_controls(facts)


def handed_over_object(
    job: dict[str, Any], launcher: JobLauncher, pods: Iterable[dict[str, Any]], plan_uid: str, resource_name: str
) -> HandedOverObject:
    """Convert an object of the winner's job; `pods`: those that say they are of a job that the plan handed over."""
    facts = job_facts(job, launcher)
    places = ((pod, launcher.read_place(pod["metadata"].get("labels") or {})) for pod in pods)
    holders = [pod for pod, place in places if place is not None and place.job == facts.name and _holds_devices(pod)]
    starts = ((pod.get("status") or {}).get("startTime") or pod["metadata"]["creationTimestamp"] for pod in holders)
    return HandedOverObject(
        job=facts,
        is_owned=is_owned_by(job, plan_uid),
        devices=sum(_requested_devices(pod["spec"], resource_name) for pod in holders),
        held_since=min(map(parse_time, starts), default=None),
    )


def _holds_devices(pod: dict[str, Any]) -> bool:
    has_ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return bool(pod["spec"].get("nodeName")) and not has_ended and is_of_gang(pod)


def pod_facts(pod: dict[str, Any]) -> PodFacts:
    """Convert a gang's pod, without its log."""
    meta, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
    labels = meta.get("labels") or {}
    places = (launcher.read_place(labels) for launcher in LAUNCHERS.values())
    place = next((place for place in places if place is not None), PodPlace("", "", -1))
    owners = meta.get("ownerReferences") or []
    unscheduled = [
        c.get("message", "")
        for c in status.get("conditions") or []
        if c["type"] == "PodScheduled" and c["status"] != "True"
    ]
    facts = PodFacts(
        name=meta["name"],
        gang=labels.get(GANG_LABEL, ""),
        job=place.job,
        role=place.role,
        index=place.index,
        created_at=parse_time(meta["creationTimestamp"]),
        phase=status.get("phase", "Pending"),
        reason=status.get("reason", ""),
        message=status.get("message", "") or " ".join(unscheduled),
        gates=tuple(gate["name"] for gate in spec.get("schedulingGates") or []),
        affinity=spec.get("affinity"),
        node=spec.get("nodeName", ""),
        started_at=_optional_time(status.get("startTime")),
        terminating="deletionTimestamp" in meta,
        containers=_containers(status),
        required_maps=_required_config_maps(pod),
        reports=LOG_LABEL in labels or (RENDEZVOUS_LABEL in labels and place.index == 0),
        uid=meta.get("uid", ""),
        job_uid=next((owner["uid"] for owner in owners if owner["name"] == place.job), ""),
    )
    return without_controls(facts)


def _required_config_maps(pod: dict[str, Any]) -> tuple[str, ...]:
    """Return the ConfigMaps that a bound pending pod requires to start."""
    spec = pod["spec"]
    if not spec.get("nodeName") or (pod.get("status") or {}).get("phase", "Pending") != "Pending":
        return ()
    mounted = (volume.get("configMap") or {} for volume in spec.get("volumes") or [])
    return tuple(source["name"] for source in mounted if source and not source.get("optional", False))


def _containers(status: dict[str, Any]) -> tuple[ContainerFacts, ...]:
    """Return the worker's container first; init containers last, since they can fail and wait for images too."""
    main = [_container(c) for c in status.get("containerStatuses") or []]
    main.sort(key=lambda container: container.name != CONTAINER)
    return (*main, *(_container(c) for c in status.get("initContainerStatuses") or []))


def _container(status: dict[str, Any]) -> ContainerFacts:
    state = status.get("state") or {}
    waiting, running, ended = (state.get(key) or {} for key in ("waiting", "running", "terminated"))
    return ContainerFacts(
        name=status["name"],
        waiting_reason=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        running_since=_optional_time(running.get("startedAt")),
        exit_code=ended.get("exitCode"),
        termination_message=ended.get("message", ""),
        termination_reason=ended.get("reason", ""),
        started_at=_optional_time(ended.get("startedAt")),
        finished_at=_optional_time(ended.get("finishedAt")),
        image_id=status.get("imageID", ""),
    )


def stored_config_map(config_map: dict[str, Any]) -> StoredConfigMap:
    """Convert a ConfigMap; a page's text, which no decision reads, is left out."""
    meta = config_map["metadata"]
    labels = meta.get("labels") or {}
    binary = {} if labels.get(ROLE_LABEL) == StoredRole.PAGE else config_map.get("binaryData") or {}
    compressed = {key: b64decode(text) for key, text in binary.items()}
    return StoredConfigMap(
        name=meta["name"],
        gang=labels.get(GANG_LABEL, ""),
        role=labels.get(ROLE_LABEL, ""),
        created_at=parse_time(meta["creationTimestamp"]),
        data=ConfigMapData(config_map.get("data") or {}, compressed).read(),
        annotations=without_controls(meta.get("annotations") or {}),
        terminating="deletionTimestamp" in meta,
        uid=meta.get("uid", ""),
        resource_version=meta.get("resourceVersion", ""),
    )


def device_requests(pods: list[dict[str, Any]], resource_name: str) -> Iterator[DeviceRequest]:
    """Return the devices that unfinished pods ask for, of those that are bound, or pinned and about to be bound."""
    for pod in pods:
        spec = pod["spec"]
        node = spec.get("nodeName") or ("" if spec.get("schedulingGates") else pinned_node(spec.get("affinity")))
        if node and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
            devices = _requested_devices(spec, resource_name)
            names = sorted(asked_network_devices(spec))
            if devices or names:
                uid, network = (
                    pod["metadata"].get("uid", ""),
                    tuple((name, _requested_devices(spec, name)) for name in names),
                )
                yield DeviceRequest(uid, node, devices, _holder(pod["metadata"]), network)


def _holder(meta: dict[str, Any]) -> DeviceHolder:
    """Return whom a pod's devices are for."""
    labels, namespace = meta.get("labels") or {}, sys.intern(meta.get("namespace", ""))
    if HANDED_OVER_LABEL in labels:
        return DeviceHolder(namespace, HolderKind.JOB, labels[HANDED_OVER_LABEL])
    if PLAN_LABEL in labels:
        return DeviceHolder(namespace, HolderKind.PLAN, labels[PLAN_LABEL])
    return DeviceHolder(namespace, HolderKind.POD, meta.get("name", ""))


def _requested_devices(spec: dict[str, Any], resource_name: str) -> int:
    def requested(container: dict[str, Any]) -> int:
        resources = container.get("resources") or {}
        amount = (resources.get("requests") or {}).get(resource_name) or (resources.get("limits") or {}).get(
            resource_name, "0"
        )
        try:
            return parse_quantity(str(amount))
        except ValueError as error:
            # The API server admits no such quantity; ignore it as the scheduler does.
            logger.warning("ignoring a container's request for %s: %s", resource_name, error)
            return 0

    together = sum(requested(container) for container in spec.get("containers") or [])
    return max([together, *(requested(container) for container in spec.get("initContainers") or [])])
