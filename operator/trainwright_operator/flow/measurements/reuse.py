"""Reuse of kept measurements: they become results of the plan, as if its own gangs had measured them.

So a plan that began with them goes on with them, whatever becomes of what it took them from, until `refutation` finds that
they do not hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from trainwright import documents
from trainwright.document_kind import document
from trainwright.profiles import LayerProfile, LayerTooLarge
from trainwright.worker_api import LinkTask, ProfilingReport, ProfilingTask, WorkerReport
from trainwright_operator.flow.actions import CreateConfigMap, StoredRole
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.documents.link_results import report_of_nodes
from trainwright_operator.flow.documents.outcome import REUSED_KEY, GangOutcome, OutcomeState, dump_result
from trainwright_operator.flow.documents.stored_documents import parse_strict
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.worker_image import IMAGE_KEY, WorkerImage, differ, is_of_plan
from trainwright_operator.flow.measurements.former_revision import former_revision
from trainwright_operator.flow.measurements.kept_measurements import (
    KeptMeasurement,
    kept_links,
    kept_profiles,
    link_key,
    measured_nodes,
    profile_key,
)
from trainwright_operator.flow.measurements.measurement_keys import KeptProfile, known_layers, layer_digest
from trainwright_operator.flow.measurements.spot_check import ExpectedLayer, choose_layer
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.snapshot import StoredConfigMap

KeptProfiles = KeptMeasurement[KeptProfile, ProfilingReport]


@document("Reuse")
@dataclass(frozen=True, slots=True)
class Reuse:
    """Kept measurements that a result is, when the oldest of them was taken, and what trials check of them."""

    measurements: tuple[str, ...]
    measured_at: datetime
    check: ExpectedLayer | None = None

    @classmethod
    def of(cls, stored: StoredConfigMap) -> Reuse | None:
        """Return how a result was reused, or None where it was measured. Raise DocumentError if it was modified."""
        text = stored.data.get(REUSED_KEY)
        reuse: Reuse | None = parse_strict(text, cls, stored.name) if text is not None else None
        return reuse


def reuse_links(context: ReconcileContext, discovery: DiscoveredDevices, gang_spec: GangSpec) -> CreateConfigMap | None:
    """Return the creation of a gang's result from kept links, if they hold for its nodes and it has not begun."""
    task = gang_spec.task
    if not isinstance(task, LinkTask) or _has_begun(context, gang_spec.name):
        return None
    nodes = measured_nodes(context, discovery, task.gang)
    for kept in kept_links(context, link_key(context, task)):
        if nodes is None or not kept.key.covers(nodes):
            continue
        if not _holds(context, kept.stored, kept.image, context.spec.links.most_age_seconds):
            continue
        report = kept.report if task.pairs is not None else report_of_nodes(kept.report, discovery.nodes)
        if report is not None:
            return _reused_result(context, gang_spec.name, report, [kept])
    return None


def reuse_layers(
    context: ReconcileContext, discovery: DiscoveredDevices, gang: str, task: ProfilingTask
) -> CreateConfigMap | None:
    """Return the creation of a profiling result from kept profiles, under a name of its own where layers are missing."""
    if _has_begun(context, gang) or context.snapshot.find(context.names.result(partial_result(gang))) is not None:
        return None
    accelerator, seconds = task.gang.nodes[0].accelerator, context.spec.profiling.most_age_seconds
    names = [node.name for node in discovery.nodes if node.accelerator == accelerator]
    keys = {profile_key(context, discovery, task, name) for name in names} - {None}
    digests = {kind.name: layer_digest(task.model, task.model.kind(kind.name)) for kind in task.layer_kinds}
    profiles = [profile for profile in kept_profiles(context, (key for key in keys if key is not None))
            if _holds(context, profile.stored, profile.image, seconds)]  # fmt: skip
    profiles = [profile for profile in profiles if not differ(profiles[0].image, profile.image)]
    layers: list[LayerProfile] = []
    too_large: list[LayerTooLarge] = []
    sources: list[KeptProfiles] = []
    for kept in profiles:
        reusable = {name: known_layers(kept.report, name, task.rows) for name, digest in kept.key.layers
                 if digests.get(name) == digest}  # fmt: skip
        reused = {name: layers for name, layers in reusable.items() if layers is not None}
        for name, (measured, failed) in reused.items():
            layers.extend(measured)
            too_large.extend(failed)
            del digests[name]
        sources += [kept] if reused else []
    if not sources:
        return None
    held_bytes = (source.report.process_bytes for source in sources if source.report.process_bytes is not None)
    unchecked = dict.fromkeys(sentence for source in sources for sentence in source.report.unchecked)
    report = ProfilingReport(tuple(layers), tuple(too_large), max(held_bytes, default=None), unchecked=tuple(unchecked))
    name = partial_result(gang) if digests else gang
    check = choose_layer(
        task, layers, ((_present_node(context, profile), profile.key, profile.report) for profile in profiles)
    )
    return _reused_result(context, name, report, sources, check)


def _present_node(context: ReconcileContext, kept: KeptProfiles) -> str:
    """Return the name of the node that was measured, or an empty string where another has the name now."""
    name, uid = kept.key.node
    return name if name in context.nodes and context.nodes[name].uid == uid else ""


def partial_result(gang: str) -> str:
    """Return the name of the result with those of a gang's layers that are known, while it measures the others."""
    return f"{gang}-kept"


def missing_kinds(task: ProfilingTask, report: ProfilingReport) -> tuple[str, ...]:
    """Return the names of a task's kinds that a report does not hold at all of its rows."""
    return tuple(kind.name for kind in task.layer_kinds if known_layers(report, kind.name, task.rows) is None)


def _has_begun(context: ReconcileContext, gang: str) -> bool:
    names = context.names
    return any(context.snapshot.find(name) is not None for name in (names.task(gang), names.result(gang)))


def _holds(context: ReconcileContext, stored: StoredConfigMap, image: WorkerImage, max_age_seconds: int) -> bool:
    """Return whether a kept measurement is young enough and of the image that the plan's pods would run."""
    refuted_at = former_revision(context).refuted_at
    is_young = context.now - stored.created_at <= timedelta(seconds=max_age_seconds) and max_age_seconds > 0
    return is_young and (refuted_at is None or stored.created_at > refuted_at) and is_of_plan(context, image)


def _reused_result(
    context: ReconcileContext,
    name: str,
    report: WorkerReport,
    sources: Sequence[KeptMeasurement[Any, Any]],
    check: ExpectedLayer | None = None,
) -> CreateConfigMap:
    names, times = (source.stored.name for source in sources), (source.stored.created_at for source in sources)
    reuse, image = Reuse(tuple(names), min(times), check), sources[0].image
    origin = f"measured at {_shown(reuse.measured_at)}, and kept in ConfigMap {', '.join(reuse.measurements)}"
    outcome = GangOutcome(
        OutcomeState.SUCCEEDED,
        Reason.MEASUREMENT_TAKEN,
        origin,
        ended_at=reuse.measured_at,
        generation=context.plan.generation,
    )
    data = dump_result(outcome, report, "") | {IMAGE_KEY: documents.dumps(image), REUSED_KEY: documents.dumps(reuse)}
    return CreateConfigMap(context.names.result(name), StoredRole.RESULT, data, name)


def _shown(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"


def describe_reuse(results: Iterable[StoredConfigMap]) -> str:
    """Return a clause on those of the results that were reused, or an empty string."""
    reuses = [reuse for result in results if (reuse := Reuse.of(result)) is not None]
    if not reuses:
        return ""
    names = sorted({name for reuse in reuses for name in reuse.measurements})
    oldest = _shown(min(reuse.measured_at for reuse in reuses))
    return (
        f"; reused from {len(names)} kept {'measurement' if len(names) == 1 else 'measurements'} of {oldest} or later"
    )
