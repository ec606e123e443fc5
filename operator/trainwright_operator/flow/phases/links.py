"""Phase `LinksMeasured`: latency and bandwidth between and within nodes, of all links or of samples.

With many nodes, or names too long for a report of all links, a first gang measures samples of every link kind; a
follow-up gang measures more links of the kinds whose samples are inconsistent. Waits for the gangs; each fails after
`links.deadlineSeconds` of running, and is tried again where the cluster ended it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from trainwright.measurement.collective_check import collective_sizes, measured_runtime
from trainwright.measurement.link_sampling import links_bytes
from trainwright.worker_api import LinkReport, LinkTask, Progress
from trainwright.worker_api.operator_support import runs_operators
from trainwright_operator.api.spec import Planner
from trainwright_operator.api.status import ConfigMapReference, TrainingPlanStatus
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.documents.link_results import (
    LINK_REPORT_BUDGET_BYTES,
    InconsistentLinks,
    LinkFindings,
    all_pairs,
    find_inconsistent_links,
    findings_from_all_links,
    findings_from_samples,
    fit_collective_sizes,
    intra_node_links,
    report_of_nodes,
)
from trainwright_operator.flow.documents.number_formats import formats_to_profile, model_from_spec
from trainwright_operator.flow.documents.outcome import OutcomeState, result_in
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.measurements.former_revision import former_revision
from trainwright_operator.flow.measurements.kept_measurements import advance_and_keep
from trainwright_operator.flow.measurements.reuse import describe_reuse, reuse_links
from trainwright_operator.flow.phase import Done, Failed, Findings, PhaseResult, ReconcileContext, Waiting
from trainwright_operator.flow.reasons import Explanation, Reason, explain

GANG: Final = "links"
FOLLOW_UP_GANG: Final = "links-further"


def measure_links(context: ReconcileContext, findings: Findings) -> PhaseResult:
    """Measure the links between and within the nodes."""
    discovery = findings.discovery
    if discovery.device_count == 1:
        alone = discovery.cluster()
        link_findings = LinkFindings(alone, measured_runtime(alone))
        return Done(replace(findings, links=link_findings), explain(Reason.NOT_NEEDED))
    names = [node.name for node in discovery.nodes]
    max_nodes = context.spec.links.all_pairs_up_to_nodes
    is_sampled = len(names) > max_nodes or links_bytes(all_pairs(names)) > LINK_REPORT_BUDGET_BYTES
    carried = _carried_report(context, discovery)
    if carried is not None:
        is_sampled = False
    report = carried or _measure(context, discovery, main_gang(context, discovery, is_sampled=is_sampled))
    if not isinstance(report, LinkReport):
        return report
    follow_up: LinkReport | Waiting | Failed | None = None
    try:
        if not is_sampled:
            link_findings = findings_from_all_links(discovery, report)
        else:
            inconsistent = find_inconsistent_links(discovery.sampling, report)
            if inconsistent.pairs or inconsistent.intra_nodes:
                follow_up = _measure(context, discovery, follow_up_gang(context, discovery, inconsistent))
                if not isinstance(follow_up, LinkReport):
                    return follow_up
            link_findings = findings_from_samples(discovery, report, follow_up)
    except ValueError as error:
        return Failed(explain(Reason.REPORT_INVALID, what=error))
    name = measured_links_map(context)
    reused = describe_reuse(config_map for config_map in context.snapshot.stored if config_map.name == name)
    return Done(
        replace(findings, links=link_findings),
        explain(
            Reason.MEASURED,
            links=link_findings.measured,
            further=f"{link_findings.summary(has_trials=context.spec.trials.top_k > 0)}{reused}",
        ),
        status=TrainingPlanStatus(links_ref=ConfigMapReference(config_map=name), links=link_findings.status()),
    )


def measured_links_map(context: ReconcileContext) -> str:
    """Return the name of the ConfigMap with the links, of this revision or of one before; empty if they are not measured."""
    names = (context.names.result(GANG), former_revision(context).links)
    return next((name for name in names if name and context.snapshot.find(name) is not None), "")


def _carried_report(context: ReconcileContext, discovery: DiscoveredDevices) -> LinkReport | None:
    """Return the links that a former revision measured, if it measured all of these nodes'."""
    stored = context.snapshot.find(former_revision(context).links)
    report = result_in(stored).report if stored is not None else None
    return report_of_nodes(report, discovery.nodes) if isinstance(report, LinkReport) else None


def _measure(context: ReconcileContext, discovery: DiscoveredDevices, gang: GangSpec) -> LinkReport | Waiting | Failed:
    """Return a gang's report once measured, now or for a plan before."""
    reused = reuse_links(context, discovery, gang)
    if reused is not None:
        return Waiting(actions=(reused,), progress=Progress(0, 1, "reusing measured links"))
    step = advance_and_keep(context, gang)
    if step.result is None:
        return Waiting(
            step.explanation,
            actions=step.actions,
            progress=step.progress or Progress(0, 1, f"measurement: {step.activity}"),
            live_gangs=frozenset({gang.name} if step.is_live else ()),
            is_lacking=step.is_lacking,
            again_at=step.again_at,
        )
    outcome, report = step.result.outcome, step.result.report
    if outcome.state is not OutcomeState.SUCCEEDED or not isinstance(report, LinkReport):
        return Failed(Explanation(outcome.reason, f"measuring the links: {outcome.message}"))
    return report


def main_gang(context: ReconcileContext, discovery: DiscoveredDevices, *, is_sampled: bool) -> GangSpec:
    """Return the gang for all links or samples, with a process on every device whose links are measured."""
    spec, sampling = context.spec.links, discovery.sampling
    node_names = sampling.first_nodes if is_sampled else frozenset(node.name for node in discovery.nodes)
    places = _places(discovery, node_names, insides=node_names)
    measured = (*sampling.first_pairs, *intra_node_links(node_names)) if is_sampled else all_pairs(node_names)
    model = model_from_spec(context.spec, formats_to_profile(context.spec, discovery)[0].dtype)
    sizes = collective_sizes(model) if spec.collectives else ()
    seconds = spec.deadline_seconds
    task = LinkTask(
        discovery.make_gang(places, run_seconds=seconds),
        pairs=sampling.first_pairs if is_sampled else None,
        overlap=spec.overlap and not discovery.emulations(),
        overlap_dtype=model.dtype,
        all_to_all=bool(sizes) and context.spec.search.planner is Planner.ALPA and runs_operators(model),
    )
    task = replace(task, collective_bytes=fit_collective_sizes(sizes, places, measured, len(task.collectives)))
    return GangSpec(GANG, task, pending_seconds=seconds, run_seconds=seconds)


def follow_up_gang(
    context: ReconcileContext, discovery: DiscoveredDevices, inconsistent: InconsistentLinks
) -> GangSpec:
    """Return the gang for the inconsistent links: a pod on each of their nodes."""
    node_names = {*inconsistent.intra_nodes, *(node for pair in inconsistent.pairs for node in pair)}
    places = _places(discovery, node_names, insides=inconsistent.intra_nodes)
    seconds = context.spec.links.deadline_seconds
    task = LinkTask(discovery.make_gang(places, run_seconds=seconds), pairs=inconsistent.pairs)
    return GangSpec(FOLLOW_UP_GANG, task, pending_seconds=seconds, run_seconds=seconds)


def _places(
    discovery: DiscoveredDevices, node_names: Collection[str], *, insides: Collection[str]
) -> list[tuple[str, tuple[int, ...]]]:
    """Return the wanted nodes with their slots: all where internal links are measured, else one.

    Emulated devices of a node share its links, so two of them show these.
    """
    is_emulated = bool(discovery.emulations())
    return [
        (
            node.name,
            tuple(range(min(node.devices, 2) if is_emulated else node.devices) if node.name in insides else (0,)),
        )
        for node in discovery.nodes
        if node.name in node_names
    ]
