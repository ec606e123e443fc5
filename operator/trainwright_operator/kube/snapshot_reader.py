"""Reader of one plan's snapshot from the API server."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from trainwright.worker_api import MAX_REPORT_BYTES
from trainwright_operator import plan_resource
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.spec import LauncherKind, Replan
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.decide import is_finished
from trainwright_operator.flow.gangs.child_metadata import plan_label
from trainwright_operator.flow.gangs.gang_spec import find_framework_gangs, find_series_gangs
from trainwright_operator.flow.gangs.launchers.launcher import JobLauncher
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS
from trainwright_operator.flow.gangs.scheduling import is_gated
from trainwright_operator.flow.names import HANDED_OVER_LABEL, PLAN_UID_LABEL, ROLE_LABEL
from trainwright_operator.flow.snapshot import (
    DryRun,
    JobFacts,
    PlanFacts,
    PlannerFacts,
    PodFacts,
    RequestFailure,
    Snapshot,
    StoredConfigMap,
)
from trainwright_operator.flow.winner_job.job_record import objects_to_read
from trainwright_operator.kube import client, object_facts
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.nodes.node_cache import SHARED_SECONDS, WATCH_SECONDS, NodeCache
from trainwright_operator.kube.object_cache import MEASUREMENTS_AGE_SECONDS, Children, ObjectCache, version_of
from trainwright_operator.kube.queue_reader import QueueReader
from trainwright_operator.kube.requests.back_off import QUEUE_KEY, WORKLOADS_KEY, BackOff
from trainwright_operator.kube.requests.pod_refusals import PodRefusals
from trainwright_operator.settings import Settings

_REFUSED_SECONDS: Final = 60.0
"""Age of a reading of nodes or measurements that serves plans which are refused a request, and so ask again and again."""


class _LogTail(NamedTuple):
    """End of a log to read: the first `bytes` of the last `lines`."""

    lines: int
    bytes: int


_REPORT: Final = _LogTail(400, MAX_REPORT_BYTES + 200_000)
"""A report is one line, which the container runtime splits into parts of 16 KiB; a few lines may follow it."""
_PROGRESS: Final = _LogTail(40, 64_000)
_SERIES: Final = _LogTail(4000, 2 * MAX_REPORT_BYTES + 500_000)
"""A series prints each trial's result before its report, with about twenty lines of progress for each trial. The long
tail is also read while it runs, because an interrupted series may leave no other log."""
_FRAMEWORK: Final = _LogTail(4000, 1_000_000)
"""A framework says how long its steps take wherever it likes, also while it runs."""


@dataclass(slots=True)
class ReadCache:
    """Cache of a plan between reconciliations, all of it rebuilt after a restart.

    Attributes:
        done: keys of requests that were answered and need not be repeated, though no snapshot shows what they made.
        generation: of the spec at the last reconciliation.
        has_changed: whether it changed something, or was refused something for the first time.
        deadline_seconds: seconds from it until the plan's deadline of waits; None without one.
        passes_without_report: number of reconciliations in a row that left status and Events to the next one.
        is_large: whether the plan was too large at its last reconciliation to be decided on in the loop.
    """

    dry_run: DryRun | None = None
    refusals: dict[str, str] = field(default_factory=dict)
    failing: RequestFailure | None = None
    back_off: BackOff = field(default_factory=BackOff)
    done: set[str] = field(default_factory=set)
    generation: int = 0
    has_changed: bool = False
    deadline_seconds: float | None = None
    passes_without_report: int = 0
    is_large: bool = False

    @property
    def is_refused(self) -> bool:
        """Return whether the last reconciliation was refused a request that the plan needs, or news of its queue."""
        is_tried = self.dry_run is not None and self.dry_run.reason != ""
        of_queue = any(self.back_off.times(key) for key in (QUEUE_KEY, WORKLOADS_KEY))
        return self.failing is not None or bool(self.refusals) or is_tried or of_queue

    def held_seconds(self) -> float | None:
        """Return seconds until what failed may be tried again, or until the deadline of waits, which gives an answer."""
        pause, left = self.back_off.pause(), self.deadline_seconds
        return min(pause, left) if pause is not None and left is not None and left > 0 else pause


class SnapshotReader:
    """Reader of snapshots.

    Attributes:
        cache: to be told of events, and to forget what is written.
        node_cache: to be invalidated after pods are pinned.
    """

    def __init__(self, api: Api, settings: Settings) -> None:
        self._api = api
        self._settings = settings
        self.cache = ObjectCache()
        self.node_cache = NodeCache(api, settings.namespaces)
        self._queues = QueueReader(api)
        self._pod_refusals = PodRefusals(api)

    async def plan(self, namespace: str, name: str) -> PlanFacts | None:
        """Return the current plan, or None where it is gone, being deleted or not readable."""
        cached = self.cache.plan((namespace, name))
        if cached is not None:
            return cached
        self.cache.begin_reading((namespace, name))
        try:
            resource = await self._api.get(client.plan_path(namespace, name))
        except ApiError as error:
            # A deleted namespace takes the operator's rights with it; the re-sync finds the plan once it is readable.
            if error.is_missing or error.status == 403:
                return None
            raise
        if "deletionTimestamp" in resource["metadata"]:
            return None
        return self.cache.store_plan(plan_resource.plan_facts(resource, self._settings.worker_image))

    async def snapshot(
        self, plan: PlanFacts, memory: ReadCache, planner: PlannerFacts, known_pods: Collection[PodFacts] | None = None
    ) -> Snapshot:
        """Return everything that a decision about this plan may depend on.

        With `known_pods` all is read anew, except for the logs of those that are unchanged. While a job or a pin is refused
        the watches are believed: each try costs one request.
        """
        is_known = known_pods is None or memory.is_refused
        children = self.cache.children(plan.uid) if is_known else None
        if children is None:
            children = await self._list(plan)
        elif children.stored is None:
            children.stored = await self._stored(plan)
        stored = children.stored or ()
        known_jobs = [children.jobs[name] for name in sorted(children.jobs)]
        uids = {job.name: job.uid for job in known_jobs}
        # Those of a former job of that name may still be there.
        pods_by_name = (children.pods[name] for name in sorted(children.pods))
        pods = [pod for pod in pods_by_name if not pod.job_uid or uids.get(pod.job, pod.job_uid) == pod.job_uid]
        jobs = await self._queues.with_messages(plan.namespace, known_jobs, memory.back_off)
        jobs = await self._pod_refusals.with_words(plan.namespace, jobs, pods)
        tails = dict.fromkeys(find_series_gangs(stored), _SERIES) | dict.fromkeys(
            find_framework_gangs(stored), _FRAMEWORK
        )
        missing = await self._missing_maps(plan, pods, {config_map.name for config_map in stored}, memory.back_off)
        before = {pod.name: pod for pod in known_pods or ()}
        kept = {config_map.name for config_map in stored if not config_map.terminating}
        names = None if plan.spec is None else plan.first_names.at_present(kept)
        # Of a gang whose result is stored, no log is read any more.
        over = {pod.gang for pod in pods if names is not None and names.result(pod.gang) in kept}
        snapshot = Snapshot(
            plan=plan,
            pods=tuple(
                await asyncio.gather(
                    *(
                        self._with_log(plan, pod, tails, missing, before, over=over, back_off=memory.back_off)
                        for pod in pods
                    )
                )
            ),
            jobs=jobs,
            stored=stored,
            refusals=dict(memory.refusals),
            dry_run=memory.dry_run,
            planner=planner,
            failing=memory.failing,
            rules=self._settings.rules,
            draws_pages=True,
        )
        snapshot = await self._with_nodes(await self._with_handed_over(snapshot), memory)
        return await self._with_measurements(snapshot, memory)

    async def _with_handed_over(self, snapshot: Snapshot) -> Snapshot:
        """Add the winner's job while the plan may have to act on it. No watch tells of it, nor of its pods."""
        plan, references = snapshot.plan, objects_to_read(snapshot)
        if not references or plan.spec is None:
            return snapshot
        read_objects = [
            read_object
            for read_object in await asyncio.gather(*(self._handed_over(plan, *reference) for reference in references))
            if read_object
        ]
        if not read_objects:
            return snapshot
        selector = f"{HANDED_OVER_LABEL}={plan_label(plan)}"
        pods = await self._api.list(client.core_path("pods", plan.namespace), labelSelector=selector)
        resource = plan.spec.devices.resource_name
        objects = (
            object_facts.handed_over_object(job, launcher, pods, plan.uid, resource) for job, launcher in read_objects
        )
        return replace(snapshot, handed_over=tuple(objects))

    async def _handed_over(
        self, plan: PlanFacts, kind: LauncherKind, name: str
    ) -> tuple[dict[str, Any], JobLauncher] | None:
        """Return an object that the plan handed over, or None where there is none of that name."""
        launcher = LAUNCHERS[kind]
        try:
            job = await self._api.get(f"{client.jobs_path(launcher.api, plan.namespace)}/{name}")
        except ApiError as error:
            if error.is_missing:
                return None
            raise
        return (job, launcher) if plan.uid in object_facts.owner_uids(job) else None

    async def _with_measurements(self, snapshot: Snapshot, memory: ReadCache) -> Snapshot:
        """Add the kept measurements of the namespace while links or layers may be reused.

        That is until the profiles are stored, and not while a gang measures what was not kept.
        """
        spec = snapshot.plan.spec
        if spec is None or spec.suspend or is_finished(snapshot):
            return snapshot
        names = snapshot.names()
        if snapshot.find(names.discovery) is None or snapshot.find(names.profiles) is not None:
            return snapshot
        tasks = (stored for stored in snapshot.stored if stored.role == StoredRole.TASK and names.owns(stored.name))
        if any(not task.terminating and snapshot.find(names.result(task.gang)) is None for task in tasks):
            return snapshot
        if not spec.links.most_age_seconds and not spec.profiling.most_age_seconds:
            return snapshot
        namespace, selector = snapshot.plan.namespace, f"{ROLE_LABEL}={StoredRole.MEASUREMENT}"
        age_seconds = _REFUSED_SECONDS if memory.is_refused else MEASUREMENTS_AGE_SECONDS
        measurements = self.cache.measurements(namespace, age_seconds)
        if measurements is None:
            items = await self._api.list(client.core_path("configmaps", namespace), labelSelector=selector)
            measurements = self.cache.store_measurements(namespace, map(object_facts.stored_config_map, items))
        return replace(snapshot, measurements=measurements)

    async def _list(self, plan: PlanFacts) -> Children:
        selector = f"{PLAN_UID_LABEL}={plan.uid}"
        self.cache.begin_listing(plan.uid)
        # Pods before jobs: a pod that is missing because its job has ended must find the job ended, too.
        pods, version = await self._api.list_with_version(
            client.core_path("pods", plan.namespace), labelSelector=selector
        )
        jobs, stored = await asyncio.gather(self._jobs(plan.namespace, selector), self._stored(plan))
        own = map(object_facts.pod_facts, filter(object_facts.is_of_gang, pods))
        return self.cache.store_children(plan.uid, own, jobs, stored, version_of(version))

    async def _stored(self, plan: PlanFacts) -> tuple[StoredConfigMap, ...]:
        selector = f"{PLAN_UID_LABEL}={plan.uid}"
        items = await self._api.list(client.core_path("configmaps", plan.namespace), labelSelector=selector)
        return tuple(map(object_facts.stored_config_map, filter(object_facts.is_of_plan, items)))

    async def _jobs(self, namespace: str, selector: str) -> list[JobFacts]:
        listings = (self._jobs_of(launcher, namespace, selector) for launcher in LAUNCHERS.values())
        return [job for jobs in await asyncio.gather(*listings) for job in jobs]

    async def _jobs_of(self, launcher: JobLauncher, namespace: str, selector: str) -> list[JobFacts]:
        try:
            jobs = await self._api.list(client.jobs_path(launcher.api, namespace), labelSelector=selector)
        except ApiError as error:
            if error.is_missing:
                return []  # this cluster lacks the launcher, as the dry run reports
            raise
        return [object_facts.job_facts(job, launcher) for job in filter(object_facts.is_of_plan, jobs)]

    async def _with_nodes(self, snapshot: Snapshot, memory: ReadCache) -> Snapshot:
        """Add the nodes: as they are now for discovery and placement, else as of a while ago to see whether they changed."""
        spec = snapshot.plan.spec
        is_idle = spec is not None and spec.suspend and not snapshot.pods
        if spec is None or is_idle or (is_finished(snapshot) and spec.replan is Replan.NEVER):
            return snapshot
        is_new = snapshot.find(snapshot.names().discovery) is None
        age_seconds = SHARED_SECONDS if is_new else WATCH_SECONDS
        usage_age = SHARED_SECONDS
        if memory.is_refused:
            age_seconds = usage_age = _REFUSED_SECONDS
        if spec.queue_name is not None:
            queue_key = snapshot.plan.namespace, spec.queue_name, spec.devices.resource_name
            snapshot = replace(snapshot, queue=await self._queues.queue(*queue_key, age_seconds, memory.back_off))
        cluster = snapshot.plan.status.cluster
        chooses_nodes = is_new or (cluster is not None and cluster.change is not None)
        needs_usage = chooses_node(snapshot.plan) or may_pin(snapshot.pods, memory.back_off)
        if needs_usage or (chooses_nodes and spec.devices.max is not None):
            # With a limit, discovery takes the nodes that are free.
            inventory, used, holders, network = await self.node_cache.usage(spec.devices.resource_name, usage_age)
            own = (node.name for node in cluster.nodes) if cluster is not None else ()
            by_node = {name: holders.get(name, ()) for name in own}
            snapshot = replace(snapshot, used_devices=used, used_network=network, holders=by_node)
        else:
            inventory = await self.node_cache.inventory(age_seconds)
        return replace(snapshot, nodes=inventory.nodes, slice_devices=inventory.slice_devices)

    async def _missing_maps(
        self, plan: PlanFacts, pods: Iterable[PodFacts], present: Collection[str], back_off: BackOff
    ) -> frozenset[str]:
        """Return missing ConfigMaps that block pods. Kubelets report them only in Events, which are not read."""

        async def is_missing(name: str) -> bool:
            key = f"mounted {name}"
            if back_off.held(key) is not None:
                return False
            try:
                await self._api.get(f"{client.core_path('configmaps', plan.namespace)}/{name}")
            except ApiError as error:
                if not error.is_missing:
                    back_off.refuse(key, error)
                return error.is_missing
            back_off.accept(key)
            return False

        names = sorted({name for pod in pods for name in pod.required_maps}.difference(present))
        are_missing = await asyncio.gather(*(is_missing(name) for name in names))
        return frozenset(name for name, missing in zip(names, are_missing, strict=True) if missing)

    async def _with_log(  # noqa: PLR0913 - each is a different fact of the reading
        self,
        plan: PlanFacts,
        pod: PodFacts,
        tails: Mapping[str, _LogTail],
        missing: Collection[str],
        before: Mapping[str, PodFacts],
        *,
        over: Collection[str],
        back_off: BackOff,
    ) -> PodFacts:
        pod_facts = replace(pod, missing_maps=tuple(name for name in pod.required_maps if name in missing))
        if not pod_facts.reports or pod_facts.gang in over or pod_facts.phase in ("Pending", "Unknown"):
            return pod_facts
        old = before.get(pod_facts.name)
        if old is not None and replace(pod_facts, log=old.log) == old:
            return old
        ended = pod_facts.phase in ("Succeeded", "Failed")
        tail = tails.get(pod_facts.gang, _REPORT if ended else _PROGRESS)
        key = f"log {pod_facts.job} {pod_facts.role} {pod_facts.index}"
        if back_off.held(key) is not None:
            return pod_facts
        try:
            log = await self._api.get_text(
                f"{client.core_path('pods', plan.namespace)}/{pod_facts.name}/log",
                container="pytorch",
                tailLines=str(tail.lines),
                limitBytes=str(tail.bytes),
            )
        except ApiError as error:
            back_off.refuse(key, error)
            return pod_facts  # the kubelet does not answer; deadlines keep running
        back_off.accept(key)
        return replace(pod_facts, log=log)


def chooses_node(plan: PlanFacts) -> bool:
    """Return whether this reconciliation may choose a node to profile on."""
    statuses = {condition.type: condition.status for condition in plan.status.conditions}
    return statuses.get(ConditionType.LINKS_MEASURED) == "True" and statuses.get(ConditionType.PROFILED) != "True"


def may_pin(pods: Collection[PodFacts], back_off: BackOff) -> bool:
    """Return whether this reconciliation may pin a pod: one of a gang without a pod whose pin has to wait."""
    held_pods = back_off.held_pins(pod.name for pod in pods)
    waiting = {pod.gang for pod in pods if pod.name in held_pods}
    return any(is_gated(pod) and pod.gang not in waiting for pod in pods)
