"""Pod template of a gang: defaults, then the user's template, then required fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from trainwright import worker_api
from trainwright_operator.api.frameworks import JobSpec
from trainwright_operator.api.pods import PodTemplate
from trainwright_operator.flow.gangs.scheduling import affinity_to, worker_tolerations
from trainwright_operator.flow.names import PLACEMENT_GATE

CONTAINER: Final = "pytorch"
"""Container name that the training operator's webhook requires; the same for all launchers, for users' templates name it."""
RENDEZVOUS_PORT: Final = 23456
TASK_VOLUME: Final = "order"
_TASK_FOLDER, _, TASK_FILE = worker_api.TASK_PATH.rpartition("/")
_GRACE_SECONDS = 5
"""Short, because a worker has nothing to save and the next gang waits for its devices."""
_NON_ROOT_USER = 65532
_CPU_MILLICORES = 500
_MEMORY_GIB = 2
"""Requests a device, about what a worker's process takes before it has loaded anything large: a kubelet short of memory
evicts pods without requests first. Without limits by default, since a model's initialisation may take much more."""
_NO_NETWORK: Final[Mapping[str, int]] = {}
ANNOTATIONS: Final = {
    # A side-car would occupy the pod's ports and outlive the worker: no rendezvous, and the job never ends.
    "sidecar.istio.io/inject": "false",
    # A measurement cannot be moved: the cluster autoscaler and Karpenter wait for its end, which a deadline bounds.
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


def render(  # noqa: PLR0913 - each is a different fact of the pod
    *,
    image: str,
    task_map: str,
    resource_name: str,
    devices: int,
    network: Mapping[str, int] = _NO_NETWORK,
    labels: Mapping[str, str],
    template: PodTemplate,
    container: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a pod template as plain data.

    The user's template may override anything except the task, devices, gate and restart policy. `container`: what the
    container runs, `worker_container` or `job_container`. `network`: amounts of network devices, by resource.
    """
    requests = _default_requests(template, devices)
    merged = merge(
        {"spec": _defaults(image=image, devices=devices, requests=requests, container=container)},
        {"spec": template.spec},
    )
    spec = merged["spec"]
    spec["restartPolicy"] = "Never"
    if isinstance(template.spec.get("tolerations", []), list):  # anything else is for the dry run to refuse
        spec["tolerations"] = worker_tolerations(template.spec, resource_name)
    spec["schedulingGates"] = [{"name": PLACEMENT_GATE}]
    spec["automountServiceAccountToken"] = False
    amounts = {name: str(amount) for name, amount in {resource_name: devices, **network}.items()}
    spec = merge(spec, _required(task_map=task_map, requests=amounts))
    return {
        "metadata": {
            "labels": {**template.metadata.labels, **labels},
            "annotations": {**ANNOTATIONS, **template.metadata.annotations},
        },
        "spec": spec,
    }


def template_of_job(job: JobSpec, worker: PodTemplate) -> PodTemplate:
    """Return the template of a user's job, with the workers' tolerations beside its own: by these nodes were chosen."""
    own, inherited = (template.spec.get("tolerations", []) for template in (job.pod_template, worker))
    if not isinstance(own, list) or not isinstance(inherited, list):
        return job.pod_template  # for the dry run to refuse
    tolerations = [*own, *(entry for entry in inherited if entry not in own)]
    return job.pod_template.model_copy(update={"spec": {**job.pod_template.spec, "tolerations": tolerations}})


def on_node(template: Mapping[str, Any], node: str, expressions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a rendered template without our gate, for pods that run on that node from the start.

    `expressions`: of the node's labels, for who reads the affinity without the node.
    """
    spec = {key: value for key, value in template["spec"].items() if key != "schedulingGates"}
    return {**template, "spec": spec | {"affinity": {"nodeAffinity": affinity_to(node, expressions)}}}


def worker_container(master: str) -> dict[str, Any]:
    """Return what our worker's container runs; `master`: address of the pod that hosts the rendezvous."""
    return {
        "command": ["python", "-m", "trainwright_worker"],
        "args": ["--master-addr", master, "--master-port", str(RENDEZVOUS_PORT)],
        # The container runtime's last words stand in the log alone, which is read of the pods that report.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def job_container(job: JobSpec, master: str, iterations: int | None = None) -> dict[str, Any]:
    """Return what the container of a job of the user's runs; `iterations`: of a trial.

    `env` sets the variables, since the training operator sets MASTER_ADDR to another pod where a gang has several jobs.
    """
    variables = {
        "NODE": f"$({worker_api.NODE_NAME_VARIABLE})",
        "MASTER_ADDR": master,
        "MASTER_PORT": RENDEZVOUS_PORT,
        **({"TRAINWRIGHT_ITERATIONS": iterations} if iterations is not None else {}),
    }
    return {
        "command": ["env", *(f"{name}={value}" for name, value in variables.items()), *job.command],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _defaults(*, image: str, devices: int, requests: dict[str, str], container: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _NON_ROOT_USER,
            "runAsGroup": _NON_ROOT_USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": CONTAINER,
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                **container,
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "resources": {"requests": requests},
            }
        ],
        # Its content counts as the pod's memory; unlimited, it could take half of the node's.
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{devices}Gi"}}],
    }


def _default_requests(template: PodTemplate, devices: int) -> dict[str, str]:
    """Return the default requests, except of what the user limits: the API server then requests the limit."""
    requests = {"cpu": f"{_CPU_MILLICORES * devices}m", "memory": f"{_MEMORY_GIB * devices}Gi"}
    containers = template.spec.get("containers")
    given = merge({"containers": [{"name": CONTAINER}]}, {"containers": containers})["containers"]
    worker: Mapping[str, Any] = (
        next((resource for resource in given if resource["name"] == CONTAINER), {}) if _is_named(given) else {}
    )
    resources = worker.get("resources")
    limits = resources.get("limits") if isinstance(resources, Mapping) else None
    return {name: amount for name, amount in requests.items() if not isinstance(limits, Mapping) or name not in limits}


def _required(*, task_map: str, requests: Mapping[str, str]) -> dict[str, Any]:
    return {
        "containers": [
            {
                "name": CONTAINER,
                "env": [
                    {"name": worker_api.NODE_NAME_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
                ],
                "resources": {"requests": dict(requests), "limits": dict(requests)},
                "volumeMounts": [
                    {"name": TASK_VOLUME, "mountPath": _TASK_FOLDER, "readOnly": True},
                    # The default of 64 MiB is less than one NCCL or gloo buffer set.
                    {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - the fixed path of shared memory
                ],
            }
        ],
        "volumes": [{"name": TASK_VOLUME, "configMap": {"name": task_map}}],
    }


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Merge objects by field and lists of named items by name; replace anything else. Leave the arguments unchanged."""
    merged: dict[str, Any] = dict(base)
    for key, value in override.items():
        present = merged.get(key)
        if isinstance(present, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(present, value)
        elif _is_named(present) and _is_named(value):
            merged[key] = _merge_named(present, value)
        else:
            merged[key] = value
    return merged


def _is_named(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, Mapping) and isinstance(item.get("name"), str) for item in value
    )


def _merge_named(below: Any, above: Any) -> list[Any]:
    items = {item["name"]: item for item in below}
    for item in above:
        existing = items.get(item["name"])
        items[item["name"]] = item if existing is None else merge(existing, item)
    return list(items.values())
