"""Parts of the spec about pods: the template that is merged into them, and the workers' image."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, Field

from trainwright_operator.api.base import PLAIN_LINE, PLAIN_LINES, ApiModel, Rule, opaque, rules


class PodMetadata(ApiModel):
    """Labels and annotations that are added to every worker pod."""

    labels: Annotated[
        dict[str, Annotated[str, Field(max_length=63, json_schema_extra=PLAIN_LINE)]],
        Field(max_length=32, default_factory=dict),
    ]
    """Labels, for example those that a network policy selects by. Trainwright's own win over equal keys."""
    annotations: Annotated[
        dict[str, Annotated[str, Field(max_length=4096, json_schema_extra=PLAIN_LINES)]],
        Field(max_length=32, default_factory=dict),
    ]
    """Annotations, for example those of a network plug-in."""


_OWNED = {
    "nodeName": {"type": "string", "maxLength": 253},
    "nodeSelector": opaque(type="object"),
    "affinity": opaque(type="object"),
    "schedulingGates": {"type": "array", "maxItems": 16, "items": opaque(type="object")},
    "restartPolicy": {"type": "string", "maxLength": 32},
}
PLACING_FIELDS: Final = ("nodeName", "nodeSelector", "affinity", "schedulingGates")
NO_PLACING: Final = Rule(
    " && ".join(f"!has(self.{field})" for field in PLACING_FIELDS),
    f"podTemplate.spec cannot place the workers ({', '.join(PLACING_FIELDS)}), since the plan does; choose nodes by "
    "devices.nodeSelector",
)
NO_RESTART_POLICY: Final = Rule(
    "!has(self.restartPolicy)",
    "podTemplate.spec.restartPolicy cannot be set, since a worker that restarts would falsify the measurement; remove it",
)
_POD_SPEC = opaque(
    properties={
        field: schema | {"description": "Refused: Trainwright sets this field itself."}
        for field, schema in _OWNED.items()
    },
    **rules(NO_PLACING, NO_RESTART_POLICY),
)


MAX_NESTED_LEVELS: Final = 64
"""Levels of a pod template, far above those of a pod. The API server takes 10,000, which no schema of a definition limits."""


def _check_levels(spec: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError for objects that nest too deeply to be copied and compared."""
    level: list[Any] = [spec]
    for _ in range(MAX_NESTED_LEVELS):
        parts = [part for member in level for part in (member.values() if isinstance(member, dict) else member)]
        level = [part for part in parts if isinstance(part, dict | list)]
        if not level:
            return spec
    raise ValueError(f"nests more than {MAX_NESTED_LEVELS} levels; no pod does, so remove the innermost ones")


class PodTemplate(ApiModel):
    """Template that is merged into every worker pod."""

    metadata: PodMetadata = PodMetadata()
    """Labels and annotations that are added."""
    spec: Annotated[
        dict[str, Any], AfterValidator(_check_levels), Field(json_schema_extra=_POD_SPEC, default_factory=dict)
    ]
    """Parts of a pod's spec, for example tolerations, volumes, imagePullSecrets, priorityClassName, serviceAccountName,
    runtimeClassName, hostNetwork, as far as worker.allowPodTemplate of the chart lets them. Objects are merged field by field, lists of named things by name, other lists are
    replaced; to the tolerations one for the taint named like devices.resourceName is added. An entry of containers called `pytorch` is merged into the worker's container (env, volumeMounts,
    resources). Without one, it requests half a core and 2Gi of memory for each device and has no limits; /dev/shm holds 1Gi
    for each device."""


Architecture = Literal["amd64", "arm64", "ppc64le"]
"""Processor architecture, as nodes have it in the label kubernetes.io/arch; those of machines with GPUs."""
ARCHITECTURES: Final[tuple[str, ...]] = get_args(Architecture)


class WorkerSpec(ApiModel):
    """The pods that measure and train."""

    image: Annotated[str, Field(min_length=1, max_length=512, json_schema_extra=PLAIN_LINE)] | None = None
    """The worker's image. Absent: the one that the operator is installed with when the plan begins to measure. All pods of a
    plan run the same image, by the digest that the first measurement ran where nodes can pull that."""
    architectures: (
        Annotated[
            tuple[Architecture, ...],
            Field(min_length=1, max_length=3, json_schema_extra={"x-kubernetes-list-type": "set"}),
        ]
        | None
    ) = None
    """What the image is built for, by the label kubernetes.io/arch of nodes, for example [amd64, arm64]; nodes of others are
    left out when they are discovered. Absent: where image is absent too, worker.architectures of the chart; else every
    architecture where all nodes with devices for the plan have the same, or amd64."""
    pod_template: PodTemplate = PodTemplate()
    """What is merged into every worker pod."""
