"""Pods that the training operator and JobSet create from their objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Pod = dict[str, Any]
"""Name and labels of a pod."""


def pods_of_job(manifest: Mapping[str, Any]) -> Iterator[tuple[Pod, dict[str, Any]]]:
    """Yield each pod of a PyTorchJob or JobSet with its template."""
    name = manifest["metadata"]["name"]
    if manifest["kind"] == "PyTorchJob":
        for role, replicas in manifest["spec"]["pytorchReplicaSpecs"].items():
            for index in range(replicas["replicas"]):
                labels = {"job-name": name, "replica-type": role.lower(), "replica-index": str(index)}
                prefixed = {f"training.kubeflow.org/{key}": value for key, value in labels.items()}
                yield {"name": f"{name}-{role.lower()}-{index}", "labels": prefixed}, replicas["template"]
        return
    for one in manifest["spec"]["replicatedJobs"]:
        for index in range(one["template"]["spec"]["completions"]):
            prefixed = {
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/replicatedjob-name": one["name"],
                "batch.kubernetes.io/job-completion-index": str(index),
            }
            yield (
                {"name": f"{name}-{one['name']}-0-{index}-x7k2p", "labels": prefixed},
                one["template"]["spec"]["template"],
            )
