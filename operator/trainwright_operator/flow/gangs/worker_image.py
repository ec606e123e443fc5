"""Worker image that a plan's measurements are of: times of different images cannot be compared.

The first gang takes the plan's image and every later one the same, even if the operator's default changes meanwhile. Once
a node has reported the image's digest, later pods name it, since a tag may move; not where the digest is that of kept
measurements alone, which only hold while the tag has not moved. The image of a framework's trials is apart from that of our
worker, under a key of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from trainwright import documents
from trainwright.document_kind import document
from trainwright.worker_api import Gang
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.documents.outcome import REUSED_KEY
from trainwright_operator.flow.documents.stored_documents import parse_strict
from trainwright_operator.flow.nodes.node_platform import architecture
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.snapshot import PodFacts, StoredConfigMap

IMAGE_KEY: Final = "image.json"
FRAMEWORK_IMAGE_KEY: Final = "framework-image.json"
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


@document("WorkerImage")
@dataclass(frozen=True, slots=True)
class WorkerImage:
    """Image of a gang's pods.

    Attributes:
        reference: as in the pods' spec.
        digests: architecture of a node and the image's id there, as its kubelet reports it: digests of one tag may differ
            between architectures.
    """

    reference: str
    digests: tuple[tuple[str, str], ...] = ()


def image_record(context: ReconcileContext, gang: Gang, framework_image: str | None) -> dict[str, str]:
    """Return the entry of a new gang's task: the image of the first measurement, by its digest where nodes can pull that.

    `framework_image`: of the user's job that the gang runs, if any.
    """
    key = IMAGE_KEY if framework_image is None else FRAMEWORK_IMAGE_KEY
    reference = _first_reference(context, key, framework_image or context.plan.image)
    architectures = {_architecture(context, node.name) for node in gang.nodes}
    measured = _measured_ids(context, key, is_own=True)
    ids = {image_id for architecture, image_id in measured.items() if architecture in architectures}
    image = WorkerImage(_by_digest(reference, ids.pop()) if len(architectures) == len(ids) == 1 else reference)
    return {key: documents.dumps(image)}


def image_of_task(context: ReconcileContext, gang_name: str) -> str:
    """Return the image of a gang's pods: the one that its task names; without one, the plan's."""
    task_map = context.snapshot.find(context.names.task(gang_name))
    image = _parse(task_map, _key(context, gang_name)) if task_map is not None else None
    return image.reference if image is not None else context.plan.image


def record_of_image_that_ran(context: ReconcileContext, gang_name: str) -> dict[str, str]:
    """Return the entry of a gang's result: the image of its pods with the ids that their nodes reported."""
    image_ids = {_architecture(context, pod.node): image_id for pod, image_id in _running(context, gang_name)}
    image = WorkerImage(image_of_task(context, gang_name), tuple(image_ids.items()))
    return {_key(context, gang_name): documents.dumps(image)}


def measured_image(context: ReconcileContext, gang_name: str) -> WorkerImage:
    """Return the image that a gang measured: as the plan names it, with the ids that its nodes reported."""
    image_ids = {_architecture(context, pod.node): image_id for pod, image_id in _running(context, gang_name)}
    return WorkerImage(_first_reference(context, IMAGE_KEY, context.plan.image), tuple(image_ids.items()))


def is_of_plan(context: ReconcileContext, image: WorkerImage) -> bool:
    """Return whether an image is that of the plan's pods, as far as is known before they run."""
    measured = WorkerImage("", tuple(_measured_ids(context, IMAGE_KEY).items()))
    if dict(measured.digests).keys() & dict(image.digests).keys():
        return not differ(measured, image)
    reference = _first_reference(context, IMAGE_KEY, context.plan.image)
    digest = reference.partition("@")[2]
    return image.reference == reference or digest in {_digest(image_id) for _, image_id in image.digests}


def differ(image: WorkerImage, other: WorkerImage) -> bool:
    """Return whether two images have different digests on an architecture."""
    first, second = dict(image.digests), dict(other.digests)
    return any(_digest(first[name]) != _digest(second[name]) for name in first.keys() & second.keys())


def _first_reference(context: ReconcileContext, key: str, default: str) -> str:
    """Return the image that the first of the plan's gangs named, or the default before there is one."""
    images = chain(_images(context, StoredRole.RESULT, key), _images(context, StoredRole.TASK, key))
    return next((image.reference for image in images), default)


def _key(context: ReconcileContext, gang_name: str) -> str:
    """Return the key of a gang's image."""
    task_map = context.snapshot.find(context.names.task(gang_name))
    return FRAMEWORK_IMAGE_KEY if task_map is not None and FRAMEWORK_IMAGE_KEY in task_map.data else IMAGE_KEY


def describe_conflict(context: ReconcileContext, gang_name: str) -> str:
    """Describe a pod that runs another image than the plan's measurements or the gang's other pods, or return nothing."""
    expected = _measured_ids(context, _key(context, gang_name))
    for pod, image_id in _running(context, gang_name):
        expected_id = expected.setdefault(_architecture(context, pod.node), image_id)
        if _digest(expected_id) != _digest(image_id):
            return f"pod {pod.name} on node {pod.node} runs {image_id}, but another one of this plan ran {expected_id}"
    return ""


def _running(context: ReconcileContext, gang_name: str) -> Iterator[tuple[PodFacts, str]]:
    """Return the gang's pods with the id of their worker's image, where it is known."""
    for pod in context.snapshot.pods_of(gang_name):
        if pod.containers and pod.containers[0].image_id and not pod.terminating:
            yield pod, pod.containers[0].image_id


def _measured_ids(context: ReconcileContext, key: str, *, is_own: bool = False) -> dict[str, str]:
    """Return the image's id by architecture, as of the first measurement there; `is_own`: without reused ones."""
    image_ids: dict[str, str] = {}
    for image in _images(context, StoredRole.RESULT, key, is_own=is_own):
        image_ids = {**dict(image.digests), **image_ids}
    return image_ids


def _images(context: ReconcileContext, role: StoredRole, key: str, *, is_own: bool = False) -> Iterator[WorkerImage]:
    """Return the images under a key of the plan's results or tasks, oldest first, also of former revisions."""
    config_maps = [
        config_map for config_map in context.snapshot.stored if config_map.role == role and not config_map.terminating
    ]
    owned = [config_map for config_map in config_maps if context.names.revision_of(config_map.name) is not None]
    owned = [config_map for config_map in owned if not (is_own and REUSED_KEY in config_map.data)]
    images = (
        _parse(config_map, key)
        for config_map in sorted(owned, key=lambda config_map: (config_map.created_at, config_map.name))
    )
    return (image for image in images if image is not None)


def _parse(stored: StoredConfigMap, key: str) -> WorkerImage | None:
    """Return the image that a ConfigMap names. Former versions stored none; one that was modified counts as none."""
    try:
        image: WorkerImage = parse_strict(stored.data.get(key, ""), WorkerImage, stored.name)
    except documents.DocumentError:
        return None
    return image if image.reference else None


def _architecture(context: ReconcileContext, node_name: str) -> str:
    node = next((node for node in context.snapshot.nodes if node.name == node_name), None)
    return architecture(node) if node is not None else ""


def _digest(image_id: str) -> str:
    """Return the digest in an image's id, else the id itself."""
    match = _DIGEST.search(image_id)
    return match[0] if match is not None else image_id


def _by_digest(reference: str, image_id: str) -> str:
    """Return a reference with the id's digest instead of the tag, unless the id is of no repository or of another one.

    An image that was loaded into a node has such an id, and cannot be pulled by it.
    """
    repository, digest = _repository(reference), _DIGEST.search(image_id)
    if digest is None or "@" in reference:
        return reference
    is_same = _full_name(repository) == _full_name(_repository(image_id.rpartition("://")[2]))
    return f"{repository}@{digest[0]}" if is_same else reference


def _repository(reference: str) -> str:
    """Return a reference without tag and digest."""
    name = reference.partition("@")[0]
    head, slash, last = name.rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}"


def _full_name(repository: str) -> str:
    """Return a repository with the registry and the folder that it has by default."""
    first, slash, _ = repository.partition("/")
    if not slash:
        return f"docker.io/library/{repository}"
    return repository if first == "localhost" or "." in first or ":" in first else f"docker.io/{repository}"
