"""Second part of the phase `NodesDiscovered`: nodes that change after they were discovered.

Nodes that are gone, not usable any more or of other devices are planned without, once they have been so for
`settlingSeconds`; with `replan: OnClusterChange` new nodes are planned with, also after the plan has its answer. While
trials run, only the nodes that they use count. Each time the nodes are discovered anew, and what was measured and still
holds is carried over. The same nodes are discovered again where reused measurements turn out not to hold.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta

from trainwright import documents
from trainwright.cluster import MAX_DEVICES
from trainwright.plan import Plan
from trainwright_operator.api.spec import Replan
from trainwright_operator.api.status import ClusterChange, RevisionCause, TrainingPlanStatus, Winner
from trainwright_operator.flow.actions import Action, CreateConfigMap, SetStatus, StoredRole
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.documents.number_formats import with_formats
from trainwright_operator.flow.documents.planned_trials import PlannedTrials
from trainwright_operator.flow.gangs.kueue import explain_problem
from trainwright_operator.flow.measurements.former_revision import (
    FORMER_KEY,
    FormerRevision,
    NodeSpeed,
    former_revision,
    keep_profile,
    obsolete_maps,
)
from trainwright_operator.flow.measurements.refutation import check_reuse
from trainwright_operator.flow.names import DOCUMENT_KEY
from trainwright_operator.flow.nodes.left_out import describe_left_out
from trainwright_operator.flow.phase import Done, Findings, PhaseResult, ReconcileContext, Waiting
from trainwright_operator.flow.phases.discovery import find_lost_nodes, inspect_all, inspect_nodes, listed
from trainwright_operator.flow.phases.links import measured_links_map
from trainwright_operator.flow.phases.profiling import needed_runs, stored_profiles
from trainwright_operator.flow.reasons import Reason, explain
from trainwright_operator.flow.trials.device_time import trial_device_seconds

_LONGEST_SETTLING = 5
"""Multiple of settlingSeconds after which a change counts although further nodes come and go."""


def watch_nodes(context: ReconcileContext, findings: Findings) -> PhaseResult:
    """Go on while the nodes are as discovered, or changed only a moment ago; else discover them anew."""
    before = findings.discovery
    change = _find_change(context, before, _nodes_of_trials(context))
    reused, former = check_reuse(context, before), former_revision(context)
    refuted = reused.refutation
    if refuted is not None:
        revised = _next_discovery(context, before, before, refuted.what, trial_device_seconds(context))
        return Waiting(explain(Reason.MEASUREMENTS_OUTDATED, what=refuted.what), actions=(revised,))
    cluster = before.status(former.speeds_with(reused.speeds)).model_copy(
        update={
            "revision": context.names.revision,
            "revision_cause": former.cause if context.names.revision > 1 else None,
            "change": change,
            "refuted": former.refuted_status(),
        }
    )
    status = TrainingPlanStatus(cluster=cluster)
    if change is None or not _is_settled(context, change):
        return Done(findings, status=status, actions=obsolete_maps(context))
    now = _present_devices(context, before)
    if not now.nodes:
        what = describe_left_out(inspect_all(context.snapshot, context.spec).left_out)
        return Waiting(explain(Reason.NO_USABLE_NODES, what=what), status=status, is_lacking=True)
    explanation = explain(Reason.NODES_CHANGED, what=change.what)
    seconds = trial_device_seconds(context)
    return Waiting(explanation, status=status, actions=(_next_discovery(context, before, now, change.what, seconds),))


def replan(context: ReconcileContext) -> tuple[Action, ...]:
    """Return the actions of a plan that has its answer: the next discovery, once a change of the nodes has settled.

    A plan whose stored documents were modified keeps its answer.
    """
    try:
        return _replan(context)
    except documents.DocumentError:
        return ()


def _replan(context: ReconcileContext) -> tuple[Action, ...]:
    cluster = context.plan.status.cluster
    if context.plan.spec is None or cluster is None:
        return ()
    before = context.stored_document(context.names.discovery, DiscoveredDevices)
    if before is None or context.is_suspended:
        return ()
    change = _find_change(context, before, None) if context.spec.replan is Replan.ON_CLUSTER_CHANGE else None
    if change is not None and _is_settled(context, change):
        now = _present_devices(context, before)
        # Each answer may take as long as the first one.
        return (_next_discovery(context, before, now, change.what, device_seconds=0.0),) if now.nodes else ()
    if change == cluster.change:
        return ()
    changed = cluster.model_copy(update={"change": change})
    return (SetStatus(context.plan.status.model_copy(update={"cluster": changed})),)


def _find_change(
    context: ReconcileContext, before: DiscoveredDevices, needed: Collection[str] | None
) -> ClusterChange | None:
    """Return how the nodes differ from those discovered, and since when they have differed just so.

    `needed`: the only nodes whose change counts; None: all, and new ones too where the spec says so.
    """
    spec = context.spec
    if explain_problem(context) is not None:
        return None  # nobody knows which nodes the queue gives
    lost = find_lost_nodes(context.snapshot, spec, before)
    what = [f"{name}: {reason}" for name, reason in lost.items() if needed is None or name in needed]
    if needed is None and spec.replan is Replan.ON_CLUSTER_CHANGE:
        former_names = {node.name for node in before.nodes}
        new = (node for node in _present_devices(context, before).nodes if node.name not in former_names)
        what += [f"{node.name}: it is new, with {node.devices} × {node.accelerator}" for node in new]
    if not what:
        return None
    former = context.plan.status.cluster.change if context.plan.status.cluster is not None else None
    change = ClusterChange(what=listed(what), since=context.now, settling_since=context.now)
    if former is None:
        return change
    return former if former.what == change.what else change.model_copy(update={"since": former.since})


def _nodes_of_trials(context: ReconcileContext) -> frozenset[str] | None:
    """Return the nodes of the planned trials, or None before there are any.

    Once the search has its answer, a change of other nodes waits until the trials have ended: on a large cluster nodes
    change so often that else no plan would get to its end.
    """
    planned = context.stored_document(context.names.candidates(context.spec.trials.top_k), PlannedTrials)
    if planned is None:
        return None
    return frozenset(device.node for trial in planned.trials for device in trial.plan.devices)


def _is_settled(context: ReconcileContext, change: ClusterChange) -> bool:
    settling = timedelta(seconds=context.spec.settling_seconds)
    is_steady = context.now - (change.settling_since or change.since) >= settling
    return is_steady or context.now - change.since >= _LONGEST_SETTLING * settling


def _present_devices(context: ReconcileContext, before: DiscoveredDevices) -> DiscoveredDevices:
    """Inspect the nodes anew; of more devices than a plan may use, take those of the nodes that were discovered."""
    former_names = {node.name for node in before.nodes}
    inspected = inspect_nodes(context.snapshot, context.spec, former_names)
    if inspected.device_count <= MAX_DEVICES:
        return inspected
    nodes = tuple(facts for facts in context.snapshot.nodes if facts.name in former_names)
    return inspect_nodes(replace(context.snapshot, nodes=nodes), context.spec, former_names)


def _next_discovery(
    context: ReconcileContext,
    before: DiscoveredDevices,
    now: DiscoveredDevices,
    change: str,
    device_seconds: float,
) -> CreateConfigMap:
    """Return the creation of the next revision's discovery, with what is carried over to it."""
    reused = check_reuse(context, before)
    refuted = reused.refutation
    cause = refuted.cause if refuted is not None else RevisionCause.NODES
    former, winner = former_revision(context), context.plan.status.winner
    profiles = dict.fromkeys(former.profiles)
    for run in needed_runs(context, before):
        maps = stored_profiles(context, before, run)
        kept = [keep_profile(context, before, stored.name, run.dtype, run.run) for stored in maps]
        whole = tuple(part for part in kept if part is not None)
        profiles |= dict.fromkeys(whole if len(whole) == len(maps) else ())
    outdated = refuted.results if refuted is not None else frozenset[str]()
    repeated = {(profile.dtype, profile.run) for profile in profiles if profile.config_map in outdated}
    # A measurement of samples is not carried over: nobody knows which kinds of links are left.
    is_covered = {*zip(now.nodes, now.places, strict=True)} <= {*zip(before.nodes, before.places, strict=False)}
    is_covered &= _network_names(now) == _network_names(before)
    links = measured_links_map(context)
    carried = FormerRevision(
        change=change,
        device_seconds=device_seconds,
        running_plan=_plan_of(winner).in_any_format if winner else former.running_plan,
        profiles=tuple(profile for profile in profiles if (profile.dtype, profile.run) not in repeated),
        links=links if is_covered and links not in outdated else "",
        refuted_at=context.now if refuted is not None else former.refuted_at,
        drifted=refuted.nodes if refuted is not None else former.drifted,
        refuted_images=former.refuted_images + (cause is RevisionCause.IMAGE),
        refuted_speeds=former.refuted_speeds + (cause is RevisionCause.SPEED),
        speeds=tuple(NodeSpeed(name, ratio) for name, ratio in former.speeds_with(reused.speeds).items()),
        cause=cause,
    )
    data = {DOCUMENT_KEY: documents.dumps(with_formats(now, context.spec)), FORMER_KEY: documents.dumps(carried)}
    name = context.names.at_revision(context.names.revision + 1).discovery
    return CreateConfigMap(name, StoredRole.DOCUMENT, data)


def _plan_of(winner: Winner) -> Plan:
    plan: Plan = documents.parse(winner.plan, Plan, source="status.winner.plan")
    return plan


def _network_names(discovery: DiscoveredDevices) -> tuple[str, ...]:
    """Return the network devices over which all links are measured."""
    return discovery.network_names(node.name for node in discovery.nodes)
