"""ConfigMaps of kept measurements: what is written when a gang has measured, and how it is read again.

Each holds the report, the image that measured it and its key, and expires. Its name is a digest of its content's key, so
that whoever measures the same replaces it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final, Generic, TypeVar

from trainwright import documents
from trainwright.worker_api import Gang, LinkReport, LinkTask, ProfilingReport, ProfilingTask, WorkerTask
from trainwright_operator.flow.actions import CreateConfigMap, StoredRole
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.documents.outcome import REPORT_KEY
from trainwright_operator.flow.documents.stored_documents import NeedsNewerVersion, parse_strict
from trainwright_operator.flow.gangs.child_metadata import plan_label
from trainwright_operator.flow.gangs.gang_network import asked_network
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.gang_step import GangStep, Measurement
from trainwright_operator.flow.gangs.lifecycle import advance
from trainwright_operator.flow.gangs.worker_image import IMAGE_KEY, WorkerImage, measured_image
from trainwright_operator.flow.measurements.measurement_keys import (
    KeptLinks,
    KeptProfile,
    LinkKey,
    MeasuredNode,
    ProfileKey,
    digest,
    layer_digest,
)
from trainwright_operator.flow.names import (
    ACCELERATOR_LABEL,
    DTYPE_LABEL,
    EXPIRES_ANNOTATION,
    MEASURED_BY_LABEL,
    MEASUREMENT_LABEL,
    TENSOR_DEGREE_LABEL,
)
from trainwright_operator.flow.nodes.device_types import driver_version
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.snapshot import StoredConfigMap

KEY_KEY: Final = "key.json"
_PROFILE: Final = "profile"
_LINKS: Final = "links"

Key = TypeVar("Key", KeptProfile, KeptLinks)
Report = TypeVar("Report", ProfilingReport, LinkReport)


@dataclass(frozen=True, slots=True)
class KeptMeasurement(Generic[Key, Report]):
    """Kept measurement that could be read."""

    stored: StoredConfigMap
    key: Key
    report: Report
    image: WorkerImage


def advance_and_keep(context: ReconcileContext, gang_spec: GangSpec) -> GangStep:
    """Return the gang's next step, which keeps what it has measured for other plans once the plan's own result is stored."""
    step = advance(context, gang_spec)
    return replace(step, actions=(*step.actions, *keep(context, step.measured)))


def keep(context: ReconcileContext, measured: Iterable[Measurement]) -> Iterator[CreateConfigMap]:
    """Yield the ConfigMaps that keep what other plans may reuse of the measurements."""
    for measurement in measured:
        creation = _keep(context, measurement)
        if creation is not None:
            yield creation


def _keep(context: ReconcileContext, measured: Measurement) -> CreateConfigMap | None:
    gang, task, report = measured
    limits = context.spec.links if isinstance(task, LinkTask) else context.spec.profiling
    seconds, key = limits.most_age_seconds, _key(context, task)
    if key is None or not seconds:
        return None
    kind = _PROFILE if isinstance(key, KeptProfile) else _LINKS
    image = measured_image(context, gang)
    if not image.digests:
        return None  # nobody can tell whether another plan's pods run the same
    expires_at = context.now.replace(microsecond=0) + timedelta(seconds=seconds)
    return CreateConfigMap(
        f"{_prefix(kind, key.key)}{digest(key, image)}",
        StoredRole.MEASUREMENT,
        {KEY_KEY: documents.dumps(key), REPORT_KEY: documents.dumps(report), IMAGE_KEY: documents.dumps(image)},
        labels={MEASUREMENT_LABEL: kind, MEASURED_BY_LABEL: plan_label(context.plan)} | _labels(key),
        annotations={EXPIRES_ANNOTATION: expires_at.isoformat()},
    )


def _key(context: ReconcileContext, task: WorkerTask) -> KeptProfile | KeptLinks | None:
    """Return the key of a task's measurement, or None where it is of another kind, or a node is gone."""
    try:
        discovery = context.stored_document(context.names.discovery, DiscoveredDevices)
    except documents.DocumentError:
        return None  # it was modified, as the plan's condition says
    if discovery is None:
        return None
    if isinstance(task, ProfilingTask):
        node = task.gang.nodes[0].name
        key, model = profile_key(context, discovery, task, node), task.model
        layers = ((kind.name, layer_digest(model, model.kind(kind.name))) for kind in task.layer_kinds)
        return KeptProfile(key, tuple(layers), (node, context.nodes[node].uid)) if key is not None else None
    nodes = measured_nodes(context, discovery, task.gang) if isinstance(task, LinkTask) else None
    return KeptLinks(link_key(context, task), nodes) if isinstance(task, LinkTask) and nodes is not None else None


def _labels(key: KeptProfile | KeptLinks) -> dict[str, str]:
    """Return the labels that tell what was profiled; links have none."""
    if isinstance(key, KeptLinks):
        return {}
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", key.key.accelerator.name)[:63].strip("-_.")
    return {ACCELERATOR_LABEL: name, DTYPE_LABEL: key.key.dtype, TENSOR_DEGREE_LABEL: str(key.key.tensor_degree)}


def _prefix(kind: str, key: ProfileKey | LinkKey) -> str:
    """Return the beginning of the names of all measurements with a key."""
    return f"{kind}-{digest(key)}-"


def profile_key(
    context: ReconcileContext, discovery: DiscoveredDevices, task: ProfilingTask, node: str
) -> ProfileKey | None:
    """Return the key of a profiling task on a node, or None where the node or its accelerator is gone."""
    facts, name = context.nodes.get(node), task.gang.nodes[0].accelerator
    accelerator = next((accelerator for accelerator in discovery.accelerators if accelerator.name == name), None)
    if facts is None or accelerator is None:
        return None
    return ProfileKey.of(task, accelerator, driver_version(facts, context.snapshot.slice_devices), _pods(context))


def link_key(context: ReconcileContext, task: LinkTask) -> LinkKey:
    return LinkKey.of(task, _pods(context))


def _pods(context: ReconcileContext) -> str:
    """Return a digest of what the spec adds to the pods: variables, libraries, limits, annotations for their network.

    Labels change no measurement.
    """
    template = context.spec.worker.pod_template
    return digest(template.spec, template.metadata.annotations)


def measured_nodes(
    context: ReconcileContext, discovery: DiscoveredDevices, gang: Gang
) -> tuple[MeasuredNode, ...] | None:
    """Return the nodes of a gang that measures links, or None where one of them is gone."""
    network = asked_network(discovery, gang.nodes, context.spec.worker.pod_template)
    locations = {node.name: place for node, place in zip(discovery.nodes, discovery.sampling.places, strict=True)}
    measured = []
    for node in gang.nodes:
        facts = context.nodes.get(node.name)
        if facts is None or node.name not in locations:
            return None
        driver = driver_version(facts, context.snapshot.slice_devices)
        offer, location = tuple(network.get(node.name, {}).items()), str(locations[node.name])
        measured.append(MeasuredNode(node.name, facts.uid, node.slots, driver, location, offer))
    return tuple(measured)


def kept_profiles(
    context: ReconcileContext, keys: Iterable[ProfileKey]
) -> Iterator[KeptMeasurement[KeptProfile, ProfilingReport]]:
    """Yield the kept profiles with one of the keys, the newest first."""
    yield from _read(context, {_prefix(_PROFILE, key) for key in keys}, KeptProfile, ProfilingReport)


def kept_links(context: ReconcileContext, key: LinkKey) -> Iterator[KeptMeasurement[KeptLinks, LinkReport]]:
    """Yield the kept links with a key, the newest first."""
    yield from _read(context, {_prefix(_LINKS, key)}, KeptLinks, LinkReport)


def _read(
    context: ReconcileContext, prefixes: set[str], key_type: type[Key], report_type: type[Report]
) -> Iterator[KeptMeasurement[Key, Report]]:
    """Yield measurements by the beginnings of their names; those of newer versions, or modified, count as none."""
    measurements = [
        measurement for measurement in context.snapshot.measurements if measurement.name.startswith(tuple(prefixes))
    ]
    for stored in sorted(
        measurements, key=lambda measurement: (measurement.created_at, measurement.name), reverse=True
    ):
        with suppress(documents.DocumentError, NeedsNewerVersion):
            yield KeptMeasurement(
                stored,
                parse_strict(stored.data.get(KEY_KEY, ""), key_type, stored.name),
                parse_strict(stored.data.get(REPORT_KEY, ""), report_type, stored.name),
                parse_strict(stored.data.get(IMAGE_KEY, ""), WorkerImage, stored.name),
            )
