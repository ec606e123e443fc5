"""Gang with a stored task, as it is observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from trainwright.worker_api import GangNode
from trainwright_operator.flow.gangs import scheduling
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.launchers.launcher import Launcher, PodPlace, assigned_pods
from trainwright_operator.flow.gangs.launchers.registry import launcher_of
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.snapshot import JobFacts, PodFacts, StoredConfigMap

Placements = Sequence[tuple[PodFacts | None, str]]
"""Expected pods of a gang, None where one is missing, with their nodes; the first hosts the rendezvous."""


@dataclass(frozen=True)
class RunningGang:
    """Gang with a stored task; `gang_spec` has that task, which may be another than the plan would store now."""

    context: ReconcileContext
    gang_spec: GangSpec
    task_map: StoredConfigMap

    @cached_property
    def jobs(self) -> dict[str, JobFacts]:
        return {job.name: job for job in self.context.snapshot.jobs_of(self.gang_spec.name)}

    @cached_property
    def launcher(self) -> Launcher:
        return launcher_of(self.task_map)

    @cached_property
    def places(self) -> tuple[tuple[PodPlace, GangNode], ...]:
        return self.launcher.places(self.context.names, self.gang_spec.name, self.gang_spec.task.gang)

    @cached_property
    def pods(self) -> tuple[PodFacts, ...]:
        return self.context.snapshot.pods_of(self.gang_spec.name)

    @cached_property
    def placed(self) -> tuple[tuple[PodFacts | None, str], ...]:
        """Return each expected pod (None where missing) with its node, in job order."""
        return tuple((pod, node.name) for pod, node in assigned_pods(self.places, self.pods))

    @cached_property
    def gated(self) -> tuple[tuple[PodFacts, str], ...]:
        """Return the pods that still have our gate, with their nodes."""
        return tuple((pod, node) for pod, node in self.placed if pod is not None and scheduling.is_gated(pod))

    @property
    def owner_without_pod(self) -> str:
        """Return kind and name of the object that the first missing pod is to be created from; empty where none is missing."""
        lacking = (place for (place, _), (pod, _) in zip(self.places, self.placed, strict=True) if pod is None)
        return " ".join(next(map(self.launcher.pod_owner, lacking), ()))

    @property
    def started_at(self) -> datetime | None:
        """Return when the last worker started, or None while one is missing or has not."""
        starts = [_start_time(pod) for pod, _ in self.placed]
        begun = [start for start in starts if start is not None]
        return max(begun) if len(begun) == len(starts) else None

    @property
    def last_start(self) -> datetime | None:
        """Return when the last pod of this attempt started; some may be gone or terminating."""
        own = (pod for pod in self.pods if pod.created_at >= self.task_map.created_at)
        return max((start for pod in own if (start := _start_time(pod)) is not None), default=None)

    @property
    def log(self) -> str:
        return "\n".join(pod.log for pod in self.pods if pod.log)

    def node_problem(self, node_name: str) -> str:
        """Return that the node is gone or not ready, or an empty string."""
        node = self.context.nodes.get(node_name)
        if node is None:
            return f"node {node_name} no longer exists"
        return "" if node.ready else f"node {node_name} is not ready"


def _start_time(pod: PodFacts | None) -> datetime | None:
    """Return when the pod's worker started, or None where it is missing or has not."""
    worker = pod.containers[0] if pod is not None and pod.containers else None
    return worker.running_since or worker.started_at if worker is not None else None
