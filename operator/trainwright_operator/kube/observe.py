"""Making a snapshot: what the cluster holds for one plan, read afresh and no more of it than is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from trainwright.orders import MAX_REPORT_BYTES
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.flow.decide import is_finished
from trainwright_operator.flow.gang import gangs_of_series
from trainwright_operator.flow.names import PLAN_UID_LABEL, RENDEZVOUS_LABEL, Names
from trainwright_operator.flow.pinning import is_gated
from trainwright_operator.flow.snapshot import DryRun, PlanFacts, PlannerFacts, PodFacts, RequestFailure, Snapshot
from trainwright_operator.kube import facts, paths
from trainwright_operator.kube.api import Api, ApiError
from trainwright_operator.kube.occupancy import Occupancy
from trainwright_operator.settings import Settings


class _Tail(NamedTuple):
    """How much of a log's end is read: of so many lines the first so many bytes."""

    lines: int
    bytes: int


_REPORT: Final = _Tail(400, MAX_REPORT_BYTES + 200_000)
"""A report is one line, which the container's runtime breaks into parts of 16 KiB; a few lines more may follow it."""
_PROGRESS: Final = _Tail(40, 64_000)
_SERIES: Final = _Tail(4000, 2 * MAX_REPORT_BYTES + 500_000)
"""Before its report a series has told the same in parts, between them some twenty lines of progress a trial. It is read
so far back while it runs, too: what breaks off may leave no other log."""


@dataclass(slots=True)
class Memory:
    """What the operator remembers of a plan between passes; all of it is found out again after a restart."""

    dry_run: DryRun | None = None
    refusals: dict[str, str] = field(default_factory=dict)
    failing: RequestFailure | None = None


class Observer:
    """Makes snapshots.

    Attributes:
        occupancy: of the nodes; whoever places pods tells it.
    """

    def __init__(self, api: Api, settings: Settings) -> None:
        self._api = api
        self._settings = settings
        self.occupancy = Occupancy(api, settings.namespaces)

    async def plan(self, namespace: str, name: str) -> PlanFacts | None:
        """The plan as it is now; None where it is gone, on its way out, or not for us to read."""
        try:
            resource = await self._api.get(paths.plan(namespace, name))
        except ApiError as error:
            # With its namespace the rights there are gone, too; the re-sync finds it once it may be read.
            if error.is_missing or error.status == 403:
                return None
            raise
        if "deletionTimestamp" in resource["metadata"]:
            return None
        return facts.plan_facts(resource, self._settings.worker_image)

    async def snapshot(
        self, plan: PlanFacts, memory: Memory, planner: PlannerFacts, read: Collection[PodFacts] = ()
    ) -> Snapshot:
        """Everything that a decision about this plan may depend on. Of pods that stand as in `read` no log is read."""
        selector = f"{PLAN_UID_LABEL}={plan.uid}"
        # Pods before jobs: a pod that is missing because its job has ended must find the job ended, too.
        pods = await self._api.list(paths.core("pods", plan.namespace), labelSelector=selector)
        jobs, stored = await asyncio.gather(
            self._jobs(plan.namespace, selector),
            self._api.list(paths.core("configmaps", plan.namespace), labelSelector=selector),
        )
        maps = tuple(facts.stored_map(config_map) for config_map in stored)
        series = gangs_of_series(maps)
        missing = await self._missing_maps(plan, pods, known={stored.name for stored in maps})
        before = {pod.name: pod for pod in read}
        snapshot = Snapshot(
            plan=plan,
            pods=tuple(await asyncio.gather(*(self._pod(plan, pod, series, missing, before) for pod in pods))),
            jobs=tuple(facts.job_facts(job) for job in jobs),
            stored=maps,
            refusals=dict(memory.refusals),
            dry_run=memory.dry_run,
            planner=planner,
            failing=memory.failing,
        )
        return await self._with_nodes(snapshot)

    async def _jobs(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        try:
            return await self._api.list(paths.jobs(namespace), labelSelector=selector)
        except ApiError as error:
            if error.is_missing:
                return []  # no PyTorchJob in this cluster, which the dry run tells the plan
            raise

    async def _with_nodes(self, snapshot: Snapshot) -> Snapshot:
        """Nodes are read for discovery and placement alone: clusters have thousands."""
        spec = snapshot.plan.spec
        if spec is None or spec.suspend or is_finished(snapshot):
            return snapshot
        names = Names.of(snapshot.plan.name, snapshot.plan.uid, spec)
        if snapshot.find(names.discovery) is None:
            nodes, slices = await asyncio.gather(self._api.list(paths.core("nodes")), self._slices())
            devices = tuple(device for part in slices for device in facts.slice_devices(part))
            return replace(snapshot, nodes=tuple(facts.node_facts(node) for node in nodes), slice_devices=devices)
        if not needs_use(snapshot):
            return snapshot
        occupied = await self.occupancy.of(spec.devices.resource_name)
        return replace(snapshot, nodes=occupied.nodes, used_devices=occupied.devices)

    async def _slices(self) -> list[dict[str, Any]]:
        try:
            return await self._api.list(paths.RESOURCE_SLICES)
        except ApiError as error:
            if error.is_missing or error.status == 403:
                return []  # not served here, or not for us; labels are next
            raise

    async def _missing_maps(
        self, plan: PlanFacts, pods: list[dict[str, Any]], known: Collection[str]
    ) -> frozenset[str]:
        """ConfigMaps that pods wait for in vain. A kubelet tells of them in Events alone, which are not read."""

        async def is_missing(name: str) -> bool:
            try:
                await self._api.get(f"{paths.core('configmaps', plan.namespace)}/{name}")
            except ApiError as error:
                return error.is_missing
            return False

        names = sorted({name for pod in pods for name in facts.maps_waited_for(pod)}.difference(known))
        found = await asyncio.gather(*(is_missing(name) for name in names))
        return frozenset(name for name, missing in zip(names, found, strict=True) if missing)

    async def _pod(
        self,
        plan: PlanFacts,
        pod: dict[str, Any],
        series: Collection[str],
        missing: Collection[str],
        before: Mapping[str, PodFacts],
    ) -> PodFacts:
        lacking = tuple(name for name in facts.maps_waited_for(pod) if name in missing)
        found = replace(facts.pod_facts(pod), missing_maps=lacking)
        if RENDEZVOUS_LABEL not in (pod["metadata"].get("labels") or {}) or found.phase in ("Pending", "Unknown"):
            return found
        old = before.get(found.name)
        if old is not None and replace(found, log=old.log) == old:
            return old
        ended = found.phase in ("Succeeded", "Failed")
        tail = _SERIES if found.gang in series else _REPORT if ended else _PROGRESS
        try:
            log = await self._api.get_text(
                f"{paths.core('pods', plan.namespace)}/{found.name}/log",
                container="pytorch",
                tailLines=str(tail.lines),
                limitBytes=str(tail.bytes),
            )
        except ApiError:
            return found  # the kubelet does not answer now; deadlines count on
        return replace(found, log=log)


def needs_use(snapshot: Snapshot) -> bool:
    """Whether a pod may be placed in this pass, or a node chosen."""
    profiled = next((c for c in snapshot.plan.status.conditions if c.type is ConditionType.PROFILED), None)
    planned = next((c for c in snapshot.plan.status.conditions if c.type is ConditionType.LINKS_MEASURED), None)
    choosing = planned is not None and planned.status == "True" and (profiled is None or profiled.status != "True")
    return choosing or any(is_gated(pod) for pod in snapshot.pods)
