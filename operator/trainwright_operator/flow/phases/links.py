"""Phase `LinksMeasured`: latency and bandwidth between and within nodes, of all links or of samples.

With many nodes, or names too long for a report of all links, a first gang measures samples of every link kind; a
follow-up gang measures more links of the kinds whose samples are inconsistent.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from trainwright.cluster import Cluster
from trainwright.measurement.collective_check import collective_sizes, measured_runtime
from trainwright.measurement.link_sampling import Pair, links_bytes
from trainwright.worker_api import LinkReport, LinkTask
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import ConfigMapReference, Phase
from trainwright_operator.flow.gangs.lifecycle import GangStep, advance
from trainwright_operator.flow.gangs.manifests import GangSpec
from trainwright_operator.flow.gangs.outcome import OutcomeState
from trainwright_operator.flow.link_results import (
    LINK_REPORT_BUDGET_BYTES,
    InconsistentLinks,
    LinkFindings,
    all_pairs,
    find_inconsistent_links,
    findings_from_all_links,
    findings_from_samples,
    fit_collective_sizes,
    intra_node_links,
)
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.phases.acceptance import model_from_spec
from trainwright_operator.flow.phases.discovery import DiscoveredDevices
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.status_update import Book, PhaseFailed

GANG: Final = "links"
FOLLOW_UP_GANG: Final = "links-further"


def measure_links(book: Book, discovery: DiscoveredDevices) -> LinkFindings | None:
    """Return the cluster with its links once measured. Raise PhaseFailed where the measurement fails."""
    if discovery.device_count == 1:
        book.say(ConditionType.LINKS_MEASURED, "True", Reason.NOT_NEEDED)
        alone = Cluster(discovery.accelerators, discovery.nodes, links=())
        return LinkFindings(alone, measured_runtime(alone))
    names = [node.name for node in discovery.nodes]
    is_sampled = (
        len(names) > book.spec.links.all_pairs_up_to_nodes or links_bytes(all_pairs(names)) > LINK_REPORT_BUDGET_BYTES
    )
    report = _advance_gang(book, main_gang(book.context, discovery, is_sampled=is_sampled))
    if report is None:
        return None
    try:
        found = (
            _findings_from_sample_gangs(book, discovery, report)
            if is_sampled
            else findings_from_all_links(discovery, report)
        )
    except ValueError as error:
        raise PhaseFailed(Reason.REPORT_INVALID, message(Reason.REPORT_INVALID, what=error)) from None
    if found is not None:
        book.fields["links_ref"] = ConfigMapReference(config_map=book.names.result(GANG))
        book.fields["links"] = found.status()
        book.say(ConditionType.LINKS_MEASURED, "True", Reason.MEASURED, links=found.measured, further=found.summary())
    return found


def _findings_from_sample_gangs(book: Book, discovery: DiscoveredDevices, report: LinkReport) -> LinkFindings | None:
    """Return the findings from the samples, after the follow-up measurement if one is needed."""
    left = find_inconsistent_links(discovery.sampling, report)
    further: LinkReport | None = None
    if left.pairs or left.intra_nodes:
        further = _advance_gang(book, follow_up_gang(book.context, discovery, left))
        if further is None:
            return None
    return findings_from_samples(discovery, report, further)


def _advance_gang(book: Book, gang: GangSpec) -> LinkReport | None:
    """Return a gang's report once measured. Raise PhaseFailed where the measurement fails."""
    view = book.take(gang.name, advance(book.context, gang))
    if view.result is None:
        _report_progress(book, view)
        return None
    outcome, report = view.result.outcome, view.result.report
    if outcome.state is not OutcomeState.SUCCEEDED or not isinstance(report, LinkReport):
        raise PhaseFailed(outcome.reason, f"measuring the links: {outcome.message}")
    return report


def main_gang(context: ReconcileContext, discovery: DiscoveredDevices, *, is_sampled: bool) -> GangSpec:
    """Return the gang for all links or samples, with two processes on each node that has an internal link."""
    spec, sampling = context.spec.links, discovery.sampling
    wanted = sampling.first_nodes if is_sampled else frozenset(node.name for node in discovery.nodes)
    places = _places(discovery, wanted, insides=wanted)
    measured = (*sampling.first_pairs, *intra_node_links(wanted)) if is_sampled else all_pairs(wanted)
    sizes = collective_sizes(model_from_spec(context.spec)) if spec.collectives else ()
    return _gang_spec(
        context,
        discovery,
        GANG,
        places,
        pairs=sampling.first_pairs if is_sampled else None,
        collective_bytes=fit_collective_sizes(sizes, places, measured),
        overlap=spec.overlap and not discovery.emulations(),
    )


def follow_up_gang(context: ReconcileContext, discovery: DiscoveredDevices, left: InconsistentLinks) -> GangSpec:
    """Return the gang for the inconsistent links: a pod on each of their nodes."""
    wanted = {*left.intra_nodes, *(node for pair in left.pairs for node in pair)}
    places = _places(discovery, wanted, insides=left.intra_nodes)
    return _gang_spec(context, discovery, FOLLOW_UP_GANG, places, pairs=left.pairs)


def _places(
    discovery: DiscoveredDevices, wanted: Collection[str], *, insides: Collection[str]
) -> list[tuple[str, tuple[int, ...]]]:
    """Return the wanted nodes with their slots: two where an internal link is measured, else one."""
    return [
        (node.name, tuple(range(min(node.devices, 2 if node.name in insides else 1))))
        for node in discovery.nodes
        if node.name in wanted
    ]


def _gang_spec(  # noqa: PLR0913 - each is a different part of the order
    context: ReconcileContext,
    discovery: DiscoveredDevices,
    name: str,
    places: list[tuple[str, tuple[int, ...]]],
    *,
    pairs: tuple[Pair, ...] | None,
    collective_bytes: tuple[int, ...] = (),
    overlap: bool = False,
) -> GangSpec:
    seconds = context.spec.links.deadline_seconds
    order = LinkTask(
        gang=discovery.make_gang(places, run_seconds=seconds),
        pairs=pairs,
        collective_bytes=collective_bytes,
        overlap=overlap,
    )
    return GangSpec(name, order, pending_seconds=seconds, run_seconds=seconds, deadline_seconds=seconds)


def _report_progress(book: Book, view: GangStep) -> None:
    if view.progress is not None:
        book.tell_progress(Phase.MEASURING_LINKS, view.progress.what, view.progress.done, view.progress.total)
    else:
        book.tell_progress(Phase.MEASURING_LINKS, f"measurement: {view.activity}", 0, 1)
    book.say(ConditionType.LINKS_MEASURED, "Unknown", view.reason, what=view.activity)
