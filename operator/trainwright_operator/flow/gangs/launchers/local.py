"""Gang on one machine without Kubernetes: one process group, whose nodes the pods stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainwright.worker_api import Gang, GangNode
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.launchers.launcher import PodPlace, job_metadata
from trainwright_operator.flow.names import Names
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.reasons import Reason

LOCAL_GANG: Final = "LocalGang"
"""Kind of such a gang. No field of the resource can name it: in a cluster nothing would start it."""
_NODE: Final = "node"


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Launcher of local gangs."""

    kind: str = LOCAL_GANG
    missing: Reason = Reason.JOB_REFUSED

    def places(self, names: Names, gang_name: str, gang: Gang) -> tuple[tuple[PodPlace, GangNode], ...]:
        """Return a place for each node, in their order."""
        job = names.job(gang_name, 0)
        return tuple((PodPlace(job, _NODE, index), node) for index, node in enumerate(gang.nodes))

    def manifests(self, context: ReconcileContext, gang_spec: GangSpec) -> tuple[dict[str, Any], ...]:
        """Return the gang with the number of its nodes."""
        metadata = job_metadata(context, gang_spec, context.names.job(gang_spec.name, 0))
        return ({"kind": LOCAL_GANG, "metadata": metadata, "nodes": len(gang_spec.task.gang.nodes), "role": _NODE},)

    def pods(self, manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:  # noqa: ARG002 - it has none
        """Return no pod template."""
        return iter(())

    def pod_owner(self, place: PodPlace) -> tuple[str, str]:
        """Return the gang."""
        return self.kind, place.job
