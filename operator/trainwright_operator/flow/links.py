"""LinksMeasured: latency and bandwidth between nodes and within them: of all in one gang, or of a few that stand for more.

With many nodes, or names too long for a report of all their links, a first gang measures samples of every kind of link;
where those of a kind are not alike, a second one measures further links of that kind.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from trainwright.cluster import Cluster
from trainwright.collective_sizes import collective_sizes
from trainwright.link_sampling import Pair, links_bytes
from trainwright.measured_runtime import measured_runtime
from trainwright.orders import LinksOrder, LinksReport
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import ConfigMapReference, Phase
from trainwright_operator.flow.accept import model_of
from trainwright_operator.flow.book import Book, Failed
from trainwright_operator.flow.discovery import Discovery
from trainwright_operator.flow.gang import WantedGang
from trainwright_operator.flow.gang_progress import GangView, advance
from trainwright_operator.flow.link_findings import Doubts, LinkFindings, doubts, findings_of_all, findings_of_samples
from trainwright_operator.flow.links_room import ROOM_BYTES, every_pair, insides, sizes_with_room
from trainwright_operator.flow.outcome import OutcomeState
from trainwright_operator.flow.reasons import Reason, message

GANG: Final = "links"
FURTHER_GANG: Final = "links-further"


def measure_links(book: Book, discovery: Discovery) -> LinkFindings | None:
    """The cluster with its links once they are measured; raises Failed where they cannot be."""
    if discovery.devices == 1:
        book.say(ConditionType.LINKS_MEASURED, "True", Reason.NOT_NEEDED)
        alone = Cluster(discovery.accelerators, discovery.nodes, links=())
        return LinkFindings(alone, measured_runtime(alone))
    names = [node.name for node in discovery.nodes]
    is_sampled = len(names) > book.spec.links.all_pairs_up_to_nodes or links_bytes(every_pair(names)) > ROOM_BYTES
    report = _report(book, first_gang(book, discovery, is_sampled=is_sampled))
    if report is None:
        return None
    try:
        found = _sampled(book, discovery, report) if is_sampled else findings_of_all(discovery, report)
    except ValueError as error:
        raise Failed(Reason.REPORT_INVALID, message(Reason.REPORT_INVALID, what=error)) from None
    if found is not None:
        book.fields["links_ref"] = ConfigMapReference(config_map=book.names.result(GANG))
        book.fields["links"] = found.status()
        book.say(ConditionType.LINKS_MEASURED, "True", Reason.MEASURED, links=found.measured, further=found.told())
    return found


def _sampled(book: Book, discovery: Discovery, report: LinksReport) -> LinkFindings | None:
    """What the samples say, once what they leave in doubt is measured too."""
    left = doubts(discovery.sampling, report)
    further: LinksReport | None = None
    if left.pairs or left.insides:
        further = _report(book, further_gang(book, discovery, left))
        if further is None:
            return None
    return findings_of_samples(discovery, report, further)


def _report(book: Book, gang: WantedGang) -> LinksReport | None:
    """What a gang measured, once it has; raises Failed where it could not."""
    view = advance(book, gang)
    if view.result is None:
        _tell(book, view)
        return None
    outcome, report = view.result.outcome, view.result.report
    if outcome.state is not OutcomeState.SUCCEEDED or not isinstance(report, LinksReport):
        raise Failed(outcome.reason, f"measuring the links: {outcome.message}")
    return report


def first_gang(book: Book, discovery: Discovery, *, is_sampled: bool) -> WantedGang:
    """A pod on every node that is measured; two processes where there are two devices, for the link between them."""
    spec, sampling = book.spec.links, discovery.sampling
    wanted = sampling.first_nodes if is_sampled else frozenset(node.name for node in discovery.nodes)
    places = _places(discovery, wanted, insides=wanted)
    measured = (*sampling.first_pairs, *insides(wanted)) if is_sampled else every_pair(wanted)
    sizes = collective_sizes(model_of(book.spec)) if spec.collectives else ()
    return _gang(
        book,
        discovery,
        GANG,
        places,
        pairs=sampling.first_pairs if is_sampled else None,
        collective_bytes=sizes_with_room(sizes, places, measured),
        overlap=spec.overlap and not discovery.emulations(),
    )


def further_gang(book: Book, discovery: Discovery, left: Doubts) -> WantedGang:
    """A pod on every node of which a link is in doubt."""
    wanted = {*left.insides, *(node for pair in left.pairs for node in pair)}
    places = _places(discovery, wanted, insides=left.insides)
    return _gang(book, discovery, FURTHER_GANG, places, pairs=left.pairs)


def _places(
    discovery: Discovery, wanted: Collection[str], *, insides: Collection[str]
) -> list[tuple[str, tuple[int, ...]]]:
    """The wanted nodes with the slots that are used; two where there is a link inside to measure."""
    return [
        (node.name, tuple(range(min(node.devices, 2 if node.name in insides else 1))))
        for node in discovery.nodes
        if node.name in wanted
    ]


def _gang(  # noqa: PLR0913 - each is a different part of the order
    book: Book,
    discovery: Discovery,
    name: str,
    places: list[tuple[str, tuple[int, ...]]],
    *,
    pairs: tuple[Pair, ...] | None,
    collective_bytes: tuple[int, ...] = (),
    overlap: bool = False,
) -> WantedGang:
    seconds = book.spec.links.deadline_seconds
    order = LinksOrder(
        gang=discovery.gang(places, run_seconds=seconds),
        pairs=pairs,
        collective_bytes=collective_bytes,
        overlap=overlap,
    )
    return WantedGang(name, order, pending_seconds=seconds, run_seconds=seconds, deadline_seconds=seconds)


def _tell(book: Book, view: GangView) -> None:
    if view.progress is not None:
        book.tell_progress(Phase.MEASURING_LINKS, view.progress.what, view.progress.done, view.progress.total)
    else:
        book.tell_progress(Phase.MEASURING_LINKS, f"measurement: {view.what}", 0, 1)
    book.say(ConditionType.LINKS_MEASURED, "Unknown", view.reason, what=view.what)
