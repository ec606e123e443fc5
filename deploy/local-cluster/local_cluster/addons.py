"""Cluster add-ons: DNS server rights and the Kubeflow training operator."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import yaml

from local_cluster.binaries import Binaries
from local_cluster.commands import ClusterError, tail, wait_until
from local_cluster.images import BASE, TRAINING_OPERATOR
from local_cluster.kubectl import Kubectl
from local_cluster.paths import Folders, fingerprint

_MARK = "trainwright.dev/local-cluster"
_KEPT_DEFINITIONS = {"pytorchjobs.kubeflow.org"}


def apply_dns_rights(folders: Folders, kubectl: Kubectl) -> None:
    kubectl.apply((folders.sources / "addons" / "coredns.yaml").read_text(), what="giving the DNS server its rights")


def apply_training_operator(folders: Folders, binaries: Binaries, kubectl: Kubectl, image_digest: str) -> None:
    """Install the training operator unless the same build is installed."""
    template = (folders.sources / "addons" / "init-container.yaml").read_text()
    documents = list(yaml.safe_load_all(binaries.training_operator_manifests.read_text()))
    adapted = adapt_training_operator(documents, template)
    mark = fingerprint(json.dumps(adapted, sort_keys=True), image_digest)
    if _installed_mark(kubectl) == mark:
        return
    for document in adapted:
        if document["kind"] == "Deployment":
            # Also in the pod template: a new image of the same name needs a new pod.
            document["metadata"].setdefault("annotations", {})[_MARK] = mark
            document["spec"]["template"]["metadata"].setdefault("annotations", {})[_MARK] = mark
    kubectl.apply(yaml.safe_dump_all(adapted), what="installing the training operator")


def adapt_training_operator(documents: list[dict[str, Any]], init_container: str) -> list[dict[str, Any]]:
    """Adapt the published manifests to a cluster without a registry.

    Only PyTorchJobs are served. Pods that wait for their master get an image that the nodes hold, a command that works
    in it, and no more rights than the Pod Security level `restricted` allows.
    """
    kept = [
        document
        for document in documents
        if document["kind"] != "CustomResourceDefinition" or document["metadata"]["name"] in _KEPT_DEFINITIONS
    ]
    deployment = next((document for document in kept if document["kind"] == "Deployment"), None)
    if deployment is None:
        raise ClusterError("the training operator's manifests hold no Deployment; remove its folder from the cache")
    name = "training-operator-init-container"
    pod = deployment["spec"]["template"]["spec"]
    pod["nodeSelector"] = {"trainwright.dev/system": "true"}
    pod["securityContext"] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    pod["volumes"].append({"name": "init-container", "configMap": {"name": name}})
    container = pod["containers"][0]
    container["image"] = TRAINING_OPERATOR
    container["imagePullPolicy"] = "Never"
    container["args"] = ["--enable-scheme=pytorchjob", f"--pytorch-init-container-image={BASE}"]
    container["volumeMounts"].append({"name": "init-container", "mountPath": "/etc/config", "readOnly": True})
    container["securityContext"] |= {"readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    container["readinessProbe"] |= {"initialDelaySeconds": 1, "periodSeconds": 2}
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": deployment["metadata"]["namespace"]},
        "data": {"initContainer.yaml": init_container},
    }
    return [*kept[:1], settings, *kept[1:]]


def wait_for_training_operator(folders: Folders, kubectl: Kubectl, deadline_seconds: float = 120) -> None:
    """Wait until the webhook accepts a PyTorchJob. Raise ClusterError with the state of the operator's pod."""
    check: Path = folders.sources / "addons" / "webhook-check.yaml"
    started_seconds = time.monotonic()
    try:
        wait_until(
            lambda: kubectl.accepts(check),
            what="the training operator's webhook to answer",
            deadline_seconds=deadline_seconds,
            pause_seconds=0.5,
        )
    except ClusterError as error:
        waited_seconds = time.monotonic() - started_seconds
        pods = kubectl("describe", "pods", "--namespace", "kubeflow")
        raise ClusterError(f"{error} (waited {waited_seconds:.0f} s); the operator's pod:\n{tail(pods, 30)}") from error


def _installed_mark(kubectl: Kubectl) -> str | None:
    listed = kubectl.get("deployments", "--namespace", "kubeflow")["items"]
    for item in listed:
        if item["metadata"]["name"] == "training-operator":
            mark: str | None = item["metadata"].get("annotations", {}).get(_MARK)
            return mark
    return None
