"""PyTorchJobs of the Kubeflow training operator, one for each device count, since all workers of one are alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from trainwright.worker_api import Gang, GangNode
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.launchers.launcher import (
    HandedOver,
    JobApi,
    PodPlace,
    abandoned_seconds,
    job_metadata,
    pod_of,
)
from trainwright_operator.flow.names import RENDEZVOUS_LABEL, Names
from trainwright_operator.flow.nodes.network_devices import Amounts
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.reasons import Reason

_MASTER: Final = "master"
_WORKER: Final = "worker"
_API: Final = JobApi("kubeflow.org", "v1", "pytorchjobs")
_LABELS: Final = "training.kubeflow.org"


@dataclass(frozen=True, slots=True)
class _JobShape:
    """Nodes of a gang with equal counts of devices and network devices: one PyTorchJob, its Master on the first node."""

    job: str
    devices: int
    network: Amounts
    nodes: tuple[GangNode, ...]


@dataclass(frozen=True, slots=True)
class PyTorchJobLauncher:
    """Launcher of PyTorchJobs.

    Attributes:
        network: network devices that pods ask for, by node.
    """

    network: Mapping[str, Amounts] = field(default_factory=dict)
    kind: LauncherKind = LauncherKind.PYTORCH_JOB
    api: JobApi = _API
    missing: Reason = Reason.PYTORCHJOB_MISSING
    succeeded_condition: str = "Succeeded"

    def places(self, names: Names, gang_name: str, gang: Gang) -> tuple[tuple[PodPlace, GangNode], ...]:
        """Return each pod's place with its node. The gang's first node comes first, so its Master hosts the rendezvous."""
        return tuple(
            (PodPlace(shape.job, _WORKER, number - 1) if number else PodPlace(shape.job, _MASTER, 0), node)
            for shape in self._job_shapes(names, gang_name, gang)
            for number, node in enumerate(shape.nodes)
        )

    def manifests(self, context: ReconcileContext, gang_spec: GangSpec) -> tuple[dict[str, Any], ...]:
        """Return the gang's PyTorchJobs as plain data."""
        shapes = self._job_shapes(context.names, gang_spec.name, gang_spec.task.gang)
        return tuple(_manifest(context, gang_spec, shape, first_job=shapes[0].job) for shape in shapes)

    def handed_over(self, job: HandedOver) -> tuple[dict[str, Any], ...]:
        """Return a PyTorchJob for each node, since workers of one cannot have nodes of their own."""
        master = f"{job.name}-{_MASTER}-0"
        return tuple(
            job.manifest(
                _API,
                self.kind,
                number,
                {
                    "nprocPerNode": str(len(node.slots)),
                    "runPolicy": {
                        "cleanPodPolicy": "None",
                        **job.deadline,
                        **({"suspend": True} if job.suspended else {}),
                    },
                    "pytorchReplicaSpecs": {
                        "Master": {"replicas": 1, "restartPolicy": "Never", "template": job.pod(node, master)}
                    },
                },
            )
            for number, node in enumerate(job.nodes)
        )

    def pods(self, manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the pod templates of a PyTorchJob."""
        return (replicas["template"] for replicas in manifest["spec"]["pytorchReplicaSpecs"].values())

    def pod_owner(self, place: PodPlace) -> tuple[str, str]:
        """Return the PyTorchJob."""
        return self.kind, place.job

    def read_place(self, labels: Mapping[str, str]) -> PodPlace | None:
        """Return a pod's place by the training operator's labels."""
        job, index = labels.get(f"{_LABELS}/job-name"), labels.get(f"{_LABELS}/replica-index", "")
        if job is None:
            return None
        return PodPlace(job, labels.get(f"{_LABELS}/replica-type", ""), int(index) if index.isdecimal() else -1)

    def _job_shapes(self, names: Names, gang_name: str, gang: Gang) -> tuple[_JobShape, ...]:
        alike: dict[tuple[int, frozenset[tuple[str, int]]], list[GangNode]] = {}
        for node in gang.nodes:
            network = frozenset(self.network.get(node.name, {}).items())
            alike.setdefault((len(node.slots), network), []).append(node)
        return tuple(
            _JobShape(names.job(gang_name, number), devices, dict(sorted(network)), tuple(nodes))
            for number, ((devices, network), nodes) in enumerate(alike.items())
        )


def _manifest(context: ReconcileContext, gang_spec: GangSpec, shape: _JobShape, *, first_job: str) -> dict[str, Any]:
    rendezvous = {RENDEZVOUS_LABEL: "true"} if shape.job == first_job else {}

    def replicas(count: int, further: dict[str, str]) -> dict[str, Any]:
        return {
            "replicas": count,
            "restartPolicy": "Never",
            "template": pod_of(
                context,
                gang_spec,
                master=f"{first_job}-{_MASTER}-0",
                devices=shape.devices,
                network=shape.network,
                labels=further,
            ),
        }

    replica_specs = {"Master": replicas(1, rendezvous)}
    if len(shape.nodes) > 1:
        replica_specs["Worker"] = replicas(len(shape.nodes) - 1, {})
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": job_metadata(context, gang_spec, shape.job),
        "spec": {
            # An integer, because `auto` counts as one process; no elasticPolicy, because it would scramble the ranks.
            "nprocPerNode": str(shape.devices),
            "runPolicy": {
                # Pods stay until their termination messages are read; the operator then deletes the job. With
                # `Running`, the first pod that lost a peer would end the job before that peer reports its cause. No
                # backoffLimit: restartPolicy Never already ends the job at its first failure, but a limit makes the
                # training operator delete failed pods too. Without an operator, workers end at their task's deadline.
                "cleanPodPolicy": "None",
                "activeDeadlineSeconds": abandoned_seconds(gang_spec),
            },
            "pytorchReplicaSpecs": replica_specs,
        },
    }
