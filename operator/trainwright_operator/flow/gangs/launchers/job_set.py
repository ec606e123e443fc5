"""JobSet of a gang: one object for all its pods, with a Job for each accelerator and device count.

In a queue it is created suspended and Kueue alone resumes and suspends it. Its Jobs then also differ by the labels that
tell the queue's flavors apart. A node on which Kueue places pods itself has a Job of its own, whose pod names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from trainwright.worker_api import Gang, GangNode
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.gangs import pod_template
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.kueue import TOPOLOGY_ANNOTATION, LabelValues, not_in, queue_labels
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

_API: Final = JobApi("jobset.x-k8s.io", "v1alpha2", "jobsets")
_LABELS: Final = "jobset.sigs.k8s.io"
_INDEX_LABEL: Final = "batch.kubernetes.io/job-completion-index"
_NETWORK: Final = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
"""Workers connect to the first pod before it is ready."""
_NO_LIMIT: Final = 2**31 - 1
"""Limit that no Job reaches.

A Job that fails makes the JobSet delete all other Jobs, and with their pods the workers' logs and last words. Below its
limit it stays, with its failed pods, and replaces them by pods that keep the operator's gate and hold no devices (pods
that name their node hold them again), until the operator has read what the workers say and deletes the JobSet.
"""


@dataclass(frozen=True, slots=True)
class JobSetLauncher:
    """Launcher of JobSets.

    Attributes:
        network: network devices that pods ask for, by node.
        excluded_labels: by node, the labels that only flavors of other nodes have; empty without a queue.
        named_nodes: nodes that their pods name from the start, instead of having our gate.
    """

    excluded_labels: Mapping[str, LabelValues] = field(default_factory=dict)
    named_nodes: frozenset[str] = frozenset()
    network: Mapping[str, Amounts] = field(default_factory=dict)
    kind: LauncherKind = LauncherKind.JOB_SET
    api: JobApi = _API
    missing: Reason = Reason.JOBSET_MISSING
    succeeded_condition: str = "Completed"

    def places(self, names: Names, gang_name: str, gang: Gang) -> tuple[tuple[PodPlace, GangNode], ...]:
        """Return each pod's place with its node. The gang's first node comes first, so its pod hosts the rendezvous."""
        job = names.job(gang_name, 0)
        return tuple(
            (PodPlace(job, role, index), node)
            for role, nodes in self._groups(gang).items()
            for index, node in enumerate(nodes)
        )

    def manifests(self, context: ReconcileContext, gang_spec: GangSpec) -> tuple[dict[str, Any], ...]:
        """Return the gang's JobSet as plain data."""
        name = context.names.job(gang_spec.name, 0)
        groups = self._groups(gang_spec.task.gang)
        first = next(iter(groups))
        metadata, queue = job_metadata(context, gang_spec, name), queue_labels(context.spec)
        metadata["labels"] |= queue
        return (
            {
                "apiVersion": "jobset.x-k8s.io/v1alpha2",
                "kind": "JobSet",
                "metadata": metadata,
                "spec": {
                    **({"suspend": True} if queue else {}),
                    "network": _NETWORK,
                    "failurePolicy": {"maxRestarts": 0},
                    "replicatedJobs": [
                        {
                            "name": role,
                            "replicas": 1,
                            "template": _job_template(
                                context,
                                gang_spec,
                                nodes,
                                master=f"{name}-{first}-0-0.{name}",
                                is_first=role == first,
                                excluded=self.excluded_labels.get(nodes[0].name, ()),
                                is_named=nodes[0].name in self.named_nodes,
                                network=self.network.get(nodes[0].name, {}),
                            ),
                        }
                        for role, nodes in groups.items()
                    ],
                },
            },
        )

    def handed_over(self, job: HandedOver) -> tuple[dict[str, Any], ...]:
        """Return one JobSet with a Job for each node."""
        master = f"{job.name}-n0-0-0.{job.name}"
        jobs = [
            {
                "name": f"n{number}",
                "replicas": 1,
                "template": {"spec": _indexed(1) | job.deadline | {"template": job.pod(node, master)}},
            }
            for number, node in enumerate(job.nodes)
        ]
        spec = {"network": _NETWORK, "failurePolicy": {"maxRestarts": 0}, "replicatedJobs": jobs}
        return (job.manifest(_API, self.kind, 0, spec | ({"suspend": True} if job.suspended else {})),)

    def pods(self, manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the pod templates of a JobSet."""
        return (replicated["template"]["spec"]["template"] for replicated in manifest["spec"]["replicatedJobs"])

    def pod_owner(self, place: PodPlace) -> tuple[str, str]:
        """Return the only Job of the pod's replicated job."""
        return "Job", f"{place.job}-{place.role}-0"

    def read_place(self, labels: Mapping[str, str]) -> PodPlace | None:
        """Return a pod's place by the labels of JobSet's and Kubernetes' controllers."""
        job, index = labels.get(f"{_LABELS}/jobset-name"), labels.get(_INDEX_LABEL, "")
        if job is None:
            return None
        return PodPlace(job, labels.get(f"{_LABELS}/replicatedjob-name", ""), int(index) if index.isdecimal() else -1)

    def _groups(self, gang: Gang) -> dict[str, list[GangNode]]:
        """Return the nodes of each replicated job: those whose pods ask for the same, with the same flavors, or one."""
        alike: dict[tuple[str, int, LabelValues, str, frozenset[tuple[str, int]]], list[GangNode]] = {}
        for node in gang.nodes:
            own_name = node.name if node.name in self.named_nodes else ""
            network = frozenset(self.network.get(node.name, {}).items())
            key = node.accelerator, len(node.slots), self.excluded_labels.get(node.name, ()), own_name, network
            alike.setdefault(key, []).append(node)
        return {f"s{number}": nodes for number, nodes in enumerate(alike.values())}


def _indexed(pods: int) -> dict[str, Any]:
    return {"completionMode": "Indexed", "parallelism": pods, "completions": pods}


def _job_template(  # noqa: PLR0913 - each is a different fact of the Job
    context: ReconcileContext,
    gang_spec: GangSpec,
    nodes: list[GangNode],
    *,
    master: str,
    is_first: bool,
    excluded: LabelValues,
    is_named: bool,
    network: Amounts,
) -> dict[str, Any]:
    template = pod_of(
        context,
        gang_spec,
        master=master,
        devices=len(nodes[0].slots),
        network=network,
        labels={RENDEZVOUS_LABEL: "true"} if is_first else {},
    )
    if is_named:
        template = pod_template.on_node(template, nodes[0].name, not_in(excluded))
        template["metadata"]["annotations"] |= TOPOLOGY_ANNOTATION
    elif excluded:
        terms = {"nodeSelectorTerms": [{"matchExpressions": not_in(excluded)}]}
        template["spec"]["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    return {
        "spec": {
            **_indexed(len(nodes)),
            "backoffLimit": _NO_LIMIT,
            "activeDeadlineSeconds": abandoned_seconds(gang_spec),
            "template": template,
        }
    }
