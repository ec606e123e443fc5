"""Reader of Kueue's queues, and of what it says about suspended jobs.

Both are read when a decision needs them. A watch would keep every Workload of the cluster, and a resumed or suspended job
wakes its plan anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from trainwright.outside.plain_text import plain_line, without_controls
from trainwright_operator.api.quantities import parse_quantity
from trainwright_operator.flow.gangs.kueue import API_GROUP
from trainwright_operator.flow.gangs.launchers.launcher import JobApi
from trainwright_operator.flow.nodes.network_devices import is_network_device
from trainwright_operator.flow.snapshot import FlavorFacts, JobFacts, QueueFacts
from trainwright_operator.kube import client
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.object_facts import owner_uids
from trainwright_operator.kube.requests.back_off import QUEUE_KEY, WORKLOADS_KEY, BackOff

_VERSION: Final = "v1beta2"
_UID_LABEL: Final = f"{API_GROUP}/job-uid"
_NODE_LEVEL: Final = "kubernetes.io/hostname"
_RUNNING_POLICY: Final = (None, "None")


class QueueReader:
    """Reader of queues, each at most once in `age_seconds` for a resource."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._read: dict[tuple[str, str, str], tuple[float, QueueFacts]] = {}

    async def queue(
        self, namespace: str, name: str, resource_name: str, age_seconds: float, back_off: BackOff
    ) -> QueueFacts:
        """Return a queue as it was at most that long ago, or as it was last where reading it was refused a while ago."""
        key, now = (namespace, name, resource_name), asyncio.get_running_loop().time()
        cached = self._read.get(key)
        is_held = back_off.held(QUEUE_KEY) is not None
        is_old = cached is not None and (now - cached[0] >= age_seconds or back_off.times(QUEUE_KEY) > 0)
        if cached is None or (is_old and not is_held):
            try:
                reading = await self._read_queue(*key)
                back_off.accept(QUEUE_KEY)
            except ApiError as error:
                reading = _unreadable(name, error)
                back_off.refuse(QUEUE_KEY, error)
            cached = self._read[key] = now, without_controls(reading)
        return cached[1]

    async def with_messages(self, namespace: str, jobs: Sequence[JobFacts], back_off: BackOff) -> tuple[JobFacts, ...]:
        """Return the jobs, those that are suspended with what Kueue says about them, unless asking was refused a while ago."""
        if not any(job.suspended for job in jobs):
            back_off.accept(WORKLOADS_KEY)
            return tuple(jobs)
        if back_off.held(WORKLOADS_KEY) is not None:
            return tuple(jobs)
        try:
            with_messages = await asyncio.gather(*(self._with_message(namespace, job) for job in jobs))
        except ApiError as error:
            if not _is_unreadable(error):
                raise
            back_off.refuse(WORKLOADS_KEY, error)
            return tuple(jobs)
        back_off.accept(WORKLOADS_KEY)
        return tuple(with_messages)

    async def _read_queue(self, namespace: str, name: str, resource_name: str) -> QueueFacts:
        local = await self._list("localqueues", namespace, name)
        if not local:
            return QueueFacts(name, problem=f"namespace {namespace} has no LocalQueue of that name; create it")
        cluster_queue = (local[0].get("spec") or {}).get("clusterQueue", "")
        queues = await self._list("clusterqueues", "", cluster_queue) if cluster_queue else []
        flavors = await self._list("resourceflavors")
        has_topology = any((flavor.get("spec") or {}).get("topologyName") for flavor in flavors)
        topologies = await self._list("topologies") if has_topology else []
        if not queues:
            return QueueFacts(name, problem=f"its ClusterQueue {cluster_queue!r} does not exist; create it")
        stopped = next((queue for queue in (local[0], queues[0]) if not _is_running(queue)), None)
        if stopped is not None:
            return QueueFacts(name, problem=f"its {stopped.get('kind', 'ClusterQueue')} has a stopPolicy; remove it")
        return queue_facts(name, queues[0], flavors, topologies, resource_name)

    async def _with_message(self, namespace: str, job: JobFacts) -> JobFacts:
        if not job.suspended:
            return job
        workloads = await self._list("workloads", namespace, labelSelector=f"{_UID_LABEL}={job.uid}")
        workloads = [workload for workload in workloads if job.uid in owner_uids(workload)]
        if not workloads:
            what = (
                f"Kueue has no Workload of {job.launcher} {job.name} yet; `kubectl describe {job.launcher} {job.name}`"
            )
            return replace(job, queue_message=f"{what} may say why")
        return with_workload(job, workloads[0])

    async def _list(self, plural: str, namespace: str = "", name: str = "", **query: str) -> list[dict[str, Any]]:
        path = client.jobs_path(JobApi(API_GROUP, _VERSION, plural), namespace)
        return await self._api.list(path, **query, **({"fieldSelector": f"metadata.name={name}"} if name else {}))


def _is_unreadable(error: ApiError) -> bool:
    return error.is_missing or error.status == 403


def _unreadable(name: str, error: ApiError) -> QueueFacts:
    """Return why a queue cannot be read, or raise what is no answer."""
    if not _is_unreadable(error):
        raise error
    if error.is_missing:
        return QueueFacts(name, is_installed=False)
    return QueueFacts(name, problem=f"the operator may not read it; install its present roles: {error}")


def _is_running(queue: dict[str, Any]) -> bool:
    return (queue.get("spec") or {}).get("stopPolicy") in _RUNNING_POLICY


def queue_facts(
    name: str,
    cluster_queue: dict[str, Any],
    flavors: Iterable[dict[str, Any]],
    topologies: Iterable[dict[str, Any]],
    resource_name: str,
) -> QueueFacts:
    """Convert a ClusterQueue to the flavors and quotas of the resource."""
    spec, own_name = cluster_queue.get("spec") or {}, cluster_queue["metadata"]["name"]
    groups = spec.get("resourceGroups") or []
    group = next((group for group in groups if resource_name in (group.get("coveredResources") or [])), None)
    if group is None:
        what = f"its ClusterQueue {own_name} does not cover {resource_name}; add it to coveredResources, with a quota"
        return QueueFacts(name, problem=what)
    borrows = bool(spec.get("cohortName"))
    specs = {flavor["metadata"]["name"]: flavor.get("spec") or {} for flavor in flavors}
    to_nodes = {topology["metadata"]["name"] for topology in topologies if _last_level(topology) == _NODE_LEVEL}
    missing = [entry["name"] for entry in group["flavors"] if entry["name"] not in specs]
    if missing:
        return QueueFacts(
            name, problem=f"ResourceFlavor {missing[0]} of ClusterQueue {own_name} does not exist; create it"
        )
    quotas = []
    for entry in group["flavors"]:
        quota: dict[str, Any] = next(
            (resource for resource in entry.get("resources") or [] if resource["name"] == resource_name), {}
        )
        flavor = specs[entry["name"]]
        topology = flavor.get("topologyName") or ""
        quotas.append(
            FlavorFacts(
                name=entry["name"],
                node_labels=flavor.get("nodeLabels") or {},
                quota=_quota(quota, borrows=borrows),
                topology=topology,
                reaches_nodes=not topology or topology in to_nodes,
            )
        )
    return QueueFacts(name, tuple(quotas), network_quota=_network_quota(groups, borrows=borrows))


def _network_quota(groups: Iterable[dict[str, Any]], *, borrows: bool) -> dict[str, int | None]:
    """Return the most that the queue may use of each covered network device, over all flavors; None without a limit."""
    quotas: dict[str, int | None] = {}
    flavors = (entry for group in groups for entry in group.get("flavors") or [])
    for resource in (resource for entry in flavors for resource in entry.get("resources") or []):
        if is_network_device(resource["name"]):
            quota, own = quotas.get(resource["name"], 0), _quota(resource, borrows=borrows)
            quotas[resource["name"]] = None if quota is None or own is None else quota + own
    return quotas


def _last_level(topology: dict[str, Any]) -> str:
    levels = (topology.get("spec") or {}).get("levels") or [{}]
    return str(levels[-1].get("nodeLabel", ""))


def _quota(quota: dict[str, Any], *, borrows: bool) -> int | None:
    """Return the most that the queue may use, or None where only its cohort limits what it borrows."""
    nominal, limit = parse_quantity(str(quota.get("nominalQuota", "0"))), quota.get("borrowingLimit")
    if not borrows:
        return nominal
    return nominal + parse_quantity(str(limit)) if limit is not None else None


def with_workload(job: JobFacts, workload: dict[str, Any]) -> JobFacts:
    """Return the job with what its Workload says."""
    conditions = {condition["type"]: condition for condition in (workload.get("status") or {}).get("conditions") or []}
    evicted, reserved = conditions.get("Evicted", {}), conditions.get("QuotaReserved", {})
    # The eviction stands until the gang is admitted again.
    newest = evicted if evicted.get("status") == "True" else reserved
    message = newest.get("message", "") or "Kueue has not looked at it yet"
    is_active = (workload.get("spec") or {}).get("active", True)
    return replace(job, queue_message=plain_line(message), deactivated=not is_active)
