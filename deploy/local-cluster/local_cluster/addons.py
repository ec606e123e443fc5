"""Cluster add-ons: DNS server rights, the Kubeflow training operator, JobSet, and Kueue where it is asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from local_cluster import binaries
from local_cluster.binaries import Binaries, GoModule
from local_cluster.commands import ClusterError, tail, wait_until
from local_cluster.images import BASE, JOBSET, KUEUE, TRAINING_OPERATOR
from local_cluster.kubectl import Kubectl
from local_cluster.paths import Folders, fingerprint

_MARK = "trainwright.dev/local-cluster"
_KEPT_DEFINITIONS = ("pytorchjobs.kubeflow.org", "jobsets.jobset.x-k8s.io", ".kueue.x-k8s.io")
_KUEUES_SETTINGS = "controller_manager_config.yaml"
_KUEUES_KINDS = {"jobsets", "clusterqueues", "cohorts", "resourceflavors", "workloads"}
"""Kinds that Kueue's webhooks see here. The others catch every pod and Deployment, which would fail while Kueue is down."""
_SMALL = {"requests": {"cpu": "50m", "memory": "128Mi"}}
Documents = list[dict[str, Any]]


def apply_dns_rights(folders: Folders, kubectl: Kubectl) -> None:
    kubectl.apply((folders.sources / "addons" / "coredns.yaml").read_text(), what="giving the DNS server its rights")


@dataclass(frozen=True, slots=True)
class JobController:
    """Controller of a kind of jobs.

    Attributes:
        adapt: adaptation of the published manifests, given the cluster's folders.
        check: file of an object that its webhook accepts.
    """

    name: str
    module: GoModule
    image: str
    namespace: str
    deployment: str
    adapt: Callable[[Documents, Folders], Documents]
    check: str

    def apply(self, folders: Folders, programs: Binaries, kubectl: Kubectl, image_digest: str) -> None:
        """Install the controller unless the same build is installed."""
        documents = list(yaml.safe_load_all(programs.manifests(self.module).read_text()))
        adapted = self.adapt(documents, folders)
        mark = fingerprint(json.dumps(adapted, sort_keys=True), image_digest)
        if self._installed_mark(kubectl) == mark:
            return
        for document in adapted:
            if document["kind"] == "Deployment":
                # Also in the pod template: a new image of the same name needs a new pod.
                document["metadata"].setdefault("annotations", {})[_MARK] = mark
                document["spec"]["template"]["metadata"].setdefault("annotations", {})[_MARK] = mark
        kubectl.apply(yaml.safe_dump_all(adapted), what=f"installing {self.name}")

    def wait(self, folders: Folders, kubectl: Kubectl, deadline_seconds: float = 120) -> None:
        """Wait until the webhook accepts a job. Raise ClusterError with the state of the controller's pod."""
        started_seconds = time.monotonic()
        try:
            wait_until(
                lambda: kubectl.accepts(folders.sources / "addons" / self.check),
                what=f"the webhook of {self.name} to answer",
                deadline_seconds=deadline_seconds,
                pause_seconds=0.5,
            )
        except ClusterError as error:
            waited_seconds = time.monotonic() - started_seconds
            pods = kubectl("describe", "pods", "--namespace", self.namespace)
            raise ClusterError(f"{error} (waited {waited_seconds:.0f} s); its pod:\n{tail(pods, 30)}") from error

    def _installed_mark(self, kubectl: Kubectl) -> str | None:
        for item in kubectl.get("deployments", "--namespace", self.namespace)["items"]:
            if item["metadata"]["name"] == self.deployment:
                mark: str | None = item["metadata"].get("annotations", {}).get(_MARK)
                return mark
        return None


def adapt_training_operator(documents: Documents, init_container: str) -> Documents:
    """Adapt the published manifests to a cluster without a registry.

    Only PyTorchJobs are served. Pods that wait for their master get an image that the nodes hold, a command that works
    in it, and no more rights than the Pod Security level `restricted` allows.
    """
    kept, deployment = _adapt(documents, TRAINING_OPERATOR, "the training operator")
    name = "training-operator-init-container"
    pod = deployment["spec"]["template"]["spec"]
    pod["securityContext"] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    pod["volumes"].append({"name": "init-container", "configMap": {"name": name}})
    container = pod["containers"][0]
    container["args"] = ["--enable-scheme=pytorchjob", f"--pytorch-init-container-image={BASE}"]
    container["volumeMounts"].append({"name": "init-container", "mountPath": "/etc/config", "readOnly": True})
    container["securityContext"] |= {"readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": deployment["metadata"]["namespace"]},
        "data": {"initContainer.yaml": init_container},
    }
    return [*kept[:1], settings, *kept[1:]]


def adapt_jobset(documents: Documents) -> Documents:
    """Adapt the published manifests to a cluster without a registry, and to its small system node."""
    kept, deployment = _adapt(documents, JOBSET, "JobSet")
    deployment["spec"]["template"]["spec"]["containers"][0]["resources"] = _SMALL
    return kept


def adapt_kueue(documents: Documents) -> Documents:
    """Adapt the published manifests as JobSet's. Only JobSets are queued, and no API is served beside the API server's."""
    kept, deployment = _adapt(documents, KUEUE, "Kueue")
    deployment["spec"]["template"]["spec"]["containers"][0]["resources"] = _SMALL
    for document in kept:
        if document["kind"] == "ConfigMap" and _KUEUES_SETTINGS in document["data"]:
            settings = yaml.safe_load(document["data"][_KUEUES_SETTINGS])
            settings["integrations"]["frameworks"] = ["jobset.x-k8s.io/jobset"]
            settings["featureGates"] = {"VisibilityOnDemand": False}
            settings["leaderElection"]["leaderElect"] = False
            document["data"][_KUEUES_SETTINGS] = yaml.safe_dump(settings)
        if document["kind"].endswith("WebhookConfiguration"):
            document["webhooks"] = [
                one for one in document["webhooks"] if _KUEUES_KINDS.issuperset(one["rules"][0]["resources"])
            ]
    return [document for document in kept if document["kind"] != "APIService"]


def _adapt(documents: Documents, image: str, what: str) -> tuple[Documents, dict[str, Any]]:
    """Return the documents without unused definitions, and among them the Deployment, which runs the image."""
    kept = [
        document
        for document in documents
        if document["kind"] != "CustomResourceDefinition" or document["metadata"]["name"].endswith(_KEPT_DEFINITIONS)
    ]
    deployment = next((document for document in kept if document["kind"] == "Deployment"), None)
    if deployment is None:
        raise ClusterError(f"the manifests of {what} hold no Deployment; remove its folder from the cache")
    pod = deployment["spec"]["template"]["spec"]
    pod["nodeSelector"] = {"trainwright.dev/system": "true"}
    container = pod["containers"][0]
    container["image"] = image
    container["imagePullPolicy"] = "Never"
    container["readinessProbe"] |= {"initialDelaySeconds": 1, "periodSeconds": 2}
    return kept, deployment


def _init_container(folders: Folders) -> str:
    return (folders.sources / "addons" / "init-container.yaml").read_text()


JOB_CONTROLLERS = (
    JobController(
        name="the training operator",
        module=binaries.TRAINING_OPERATOR,
        image=TRAINING_OPERATOR,
        namespace="kubeflow",
        deployment="training-operator",
        adapt=lambda documents, folders: adapt_training_operator(documents, _init_container(folders)),
        check="webhook-check.yaml",
    ),
    JobController(
        name="JobSet",
        module=binaries.JOBSET,
        image=JOBSET,
        namespace="jobset-system",
        deployment="jobset-controller-manager",
        adapt=lambda documents, _: adapt_jobset(documents),
        check="jobset-check.yaml",
    ),
)


def kueue_controller(module: GoModule) -> JobController:
    """Return the controller of that release of Kueue."""
    return JobController(
        name="Kueue",
        module=module,
        image=KUEUE,
        namespace="kueue-system",
        deployment="kueue-controller-manager",
        adapt=lambda documents, _: adapt_kueue(documents),
        check="kueue-check.yaml",
    )
