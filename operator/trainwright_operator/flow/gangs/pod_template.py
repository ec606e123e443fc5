"""Pod template of a gang: defaults, then the user's template, then required fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from trainwright import worker_api
from trainwright_operator.api.spec import PodTemplate
from trainwright_operator.flow.names import PLACEMENT_GATE
from trainwright_operator.flow.scheduling import worker_tolerations

CONTAINER: Final = "pytorch"
"""Container name that the training operator's webhook requires."""
RENDEZVOUS_PORT: Final = 23456
_TASK_FOLDER, _, TASK_FILE = worker_api.TASK_PATH.rpartition("/")
_GRACE_SECONDS = 5
"""Short, because a worker has nothing to save and the next gang waits for its devices."""
_NON_ROOT_USER = 65532


def render(  # noqa: PLR0913 - each is a different fact of the pod
    *,
    image: str,
    master: str,
    task_map: str,
    resource_name: str,
    devices: int,
    labels: Mapping[str, str],
    template: PodTemplate,
) -> dict[str, Any]:
    """Return a pod template as plain data.

    The user's template may override anything except the task, devices, gate and restart policy.
    """
    merged = merge(
        {"spec": _defaults(image=image, master=master)},
        {"spec": template.spec},
    )
    spec = merged["spec"]
    spec["restartPolicy"] = "Never"
    if isinstance(template.spec.get("tolerations", []), list):  # anything else is for the dry run to refuse
        spec["tolerations"] = worker_tolerations(template.spec, resource_name)
    spec["schedulingGates"] = [{"name": PLACEMENT_GATE}]
    spec["automountServiceAccountToken"] = False
    spec = merge(spec, _required(task_map=task_map, resource_name=resource_name, devices=devices))
    return {
        "metadata": {
            "labels": {**template.metadata.labels, **labels},
            # A side-car would occupy the pod's ports and outlive the worker: no rendezvous, and the job never ends.
            "annotations": {"sidecar.istio.io/inject": "false", **template.metadata.annotations},
        },
        "spec": spec,
    }


def _defaults(*, image: str, master: str) -> dict[str, Any]:
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
                "command": ["python", "-m", "trainwright_worker"],
                "args": ["--master-addr", master, "--master-port", str(RENDEZVOUS_PORT)],
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }


def _required(*, task_map: str, resource_name: str, devices: int) -> dict[str, Any]:
    amount = {resource_name: str(devices)}
    return {
        "containers": [
            {
                "name": CONTAINER,
                "env": [
                    {"name": worker_api.NODE_NAME_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
                ],
                "resources": {"requests": amount, "limits": amount},
                "volumeMounts": [
                    {"name": "order", "mountPath": _TASK_FOLDER, "readOnly": True},
                    # The default of 64 MiB is less than one NCCL or gloo buffer set.
                    {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - the fixed path of shared memory
                ],
            }
        ],
        "volumes": [{"name": "order", "configMap": {"name": task_map}}],
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
    return isinstance(value, list) and all(isinstance(item, Mapping) and "name" in item for item in value)


def _merge_named(below: Any, above: Any) -> list[Any]:
    items = {item["name"]: item for item in below}
    for item in above:
        known = items.get(item["name"])
        items[item["name"]] = item if known is None else merge(known, item)
    return list(items.values())
