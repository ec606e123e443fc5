"""Refutation of reused measurements by pods of the plan: another image than was measured, or a node of another speed.

What is refuted is measured anew in the plan's next revision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainwright.layer import Dtype
from trainwright.worker_api import Gang, LayerCheck, ProfilingReport, TrialReport
from trainwright_operator.api.status import RevisionCause
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.documents.outcome import result_in
from trainwright_operator.flow.documents.planned_trials import GANG_PREFIXES
from trainwright_operator.flow.gangs.retries import find_retry
from trainwright_operator.flow.measurements.reuse import Reuse
from trainwright_operator.flow.measurements.spot_check import MAX_DRIFT
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.snapshot import StoredConfigMap


@dataclass(frozen=True, slots=True)
class Refutation:
    """Reused results that do not hold, and why.

    Attributes:
        results: names of the ConfigMaps.
        nodes: those of another speed.
    """

    what: str
    results: frozenset[str]
    nodes: tuple[str, ...] = ()

    @property
    def cause(self) -> RevisionCause:
        return RevisionCause.SPEED if self.nodes else RevisionCause.IMAGE


@dataclass(frozen=True, slots=True)
class ReuseCheck:
    """Findings of the plan's pods about reused results.

    Attributes:
        speeds: seconds over kept ones of each node that was checked before a trial.
    """

    refutation: Refutation | None = None
    speeds: Mapping[str, float] = field(default_factory=dict)


class _Drift(NamedTuple):
    """Seconds of a node for a layer over those that were kept of it."""

    ratio: float
    kind: str

    @property
    def size(self) -> float:
        return abs(self.ratio - 1.0)


def check_reuse(context: ReconcileContext, discovery: DiscoveredDevices) -> ReuseCheck:
    """Return what pods of the plan have shown. Raise DocumentError if a result was modified."""
    reused = list(_reused(context))
    if not reused:
        return ReuseCheck()
    drifts = _find_drifts(context, discovery, reused)
    speeds = {node: drift.ratio for node, drift in drifts.items()}
    changed = next(_changed_images(context), None)
    if changed is not None:
        return ReuseCheck(Refutation(changed, frozenset(stored.name for stored, _ in reused)), speeds)
    return ReuseCheck(_refute_by_speed(discovery, reused, drifts), speeds)


def layer_checks(context: ReconcileContext, dtype: Dtype, gang: Gang) -> tuple[LayerCheck, ...]:
    """Return the layers to check before a trial: one of each accelerator in it whose profiles were reused."""
    used = {node.accelerator for node in gang.nodes}
    checks = (reuse.check for _, reuse in _reused(context))
    by_accelerator = {check.accelerator: LayerCheck(check.accelerator, check.kind, check.rows) for check in checks
                      if check is not None and check.dtype is dtype and check.accelerator in used}  # fmt: skip
    return tuple(by_accelerator.values())


def _reused(context: ReconcileContext) -> Iterator[tuple[StoredConfigMap, Reuse]]:
    """Yield the results that were reused, also of former revisions."""
    for stored in context.snapshot.stored:
        if context.names.revision_of(stored.name) is not None and not stored.terminating:
            reuse = Reuse.of(stored)
            if reuse is not None:
                yield stored, reuse


def _changed_images(context: ReconcileContext) -> Iterator[str]:
    """Yield why attempts ended whose pods ran another image than was measured; a framework's image measured nothing."""
    others = GANG_PREFIXES if context.spec.trials.framework is not None else ()
    for stored in context.snapshot.stored:
        is_own = context.names.owns(stored.name) and not stored.gang.startswith(others)
        if stored.role == StoredRole.ATTEMPT and is_own:
            retry = find_retry(context, stored.gang)
            if retry is not None and retry.lost.reason is Reason.IMAGE_CHANGED:
                yield retry.lost.message.partition(";")[0]  # not what a plan that measured itself has to do


def _find_drifts(
    context: ReconcileContext, discovery: DiscoveredDevices, reused: Sequence[tuple[StoredConfigMap, Reuse]]
) -> dict[str, _Drift]:
    """Return the largest drift of each checked node."""
    accelerators = {node.name: node.accelerator for node in discovery.nodes}
    checks = (reuse.check for _, reuse in reused)
    expected = {(check.accelerator, check.dtype): check for check in checks if check is not None}
    drifts: dict[str, _Drift] = {}
    for stored in context.snapshot.stored:
        is_result = expected and stored.role == StoredRole.RESULT and context.names.owns(stored.name)
        report = result_in(stored).report if is_result else None
        for layer in report.checked if isinstance(report, TrialReport) else ():
            kept = expected.get((accelerators.get(layer.node, ""), layer.dtype))
            if kept is not None and (kept.kind, kept.rows) == (layer.kind, layer.rows):
                drift = _Drift(kept.drift(layer), layer.kind)
                drifts[layer.node] = max(drifts.get(layer.node, drift), drift, key=lambda each: each.size)
    return drifts


def _refute_by_speed(
    discovery: DiscoveredDevices,
    reused: Sequence[tuple[StoredConfigMap, Reuse]],
    drifts: Mapping[str, _Drift],
) -> Refutation | None:
    """Return that nodes were of another speed in a trial than when they were profiled, or None."""
    drifted = {
        node: f"{node} takes {drift.ratio:.2f} times as long for {drift.kind} as was kept"
        for node, drift in drifts.items()
        if drift.size > MAX_DRIFT
    }
    if not drifted:
        return None
    accelerators = {node.name: node.accelerator for node in discovery.nodes}
    changed = {accelerators[node] for node in drifted}
    names = frozenset(stored.name for stored, _ in reused if _accelerators(stored) & changed)
    return Refutation("; ".join(drifted.values()), names, tuple(drifted))


def _accelerators(stored: StoredConfigMap) -> set[str]:
    """Return the accelerator of a profiling result; none for links."""
    report = result_in(stored).report
    if not isinstance(report, ProfilingReport):
        return set()
    return {layer.accelerator for layer in report.layers} | {entry.accelerator for entry in report.out_of_memory}
