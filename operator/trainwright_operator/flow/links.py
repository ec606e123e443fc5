"""LinksMeasured: latency and bandwidth between every two nodes and within each, by one gang over all nodes."""

from __future__ import annotations

from typing import Final

from trainwright.cluster import Cluster
from trainwright.orders import LinksOrder, LinksReport
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import ConfigMapReference, Phase
from trainwright_operator.flow.book import Book, Failed
from trainwright_operator.flow.discovery import Discovery
from trainwright_operator.flow.gang import WantedGang
from trainwright_operator.flow.gang_progress import GangView, advance
from trainwright_operator.flow.outcome import OutcomeState
from trainwright_operator.flow.reasons import Reason, message

GANG: Final = "links"


def measure_links(book: Book, discovery: Discovery) -> Cluster | None:
    """The cluster with its links once they are measured; raises Failed where they cannot be."""
    if discovery.devices == 1:
        book.say(ConditionType.LINKS_MEASURED, "True", Reason.NOT_NEEDED)
        return Cluster(discovery.accelerators, discovery.nodes, links=())
    view = advance(book, wanted_gang(book, discovery))
    if view.result is None:
        _tell(book, view)
        return None
    outcome, report = view.result.outcome, view.result.report
    if outcome.state is not OutcomeState.SUCCEEDED or not isinstance(report, LinksReport):
        raise Failed(outcome.reason, f"measuring the links: {outcome.message}")
    try:
        cluster = Cluster(discovery.accelerators, discovery.nodes, report.links)
    except ValueError as error:
        raise Failed(Reason.REPORT_INVALID, message(Reason.REPORT_INVALID, what=error)) from None
    book.fields["links_ref"] = ConfigMapReference(config_map=book.names.result(GANG))
    book.say(ConditionType.LINKS_MEASURED, "True", Reason.MEASURED, links=len(report.links))
    return cluster


def wanted_gang(book: Book, discovery: Discovery) -> WantedGang:
    """A pod on every node; two processes where there are two devices, so that the link between them is measured."""
    seconds = book.spec.links.deadline_seconds
    places = [(node.name, tuple(range(min(node.devices, 2)))) for node in discovery.nodes]
    return WantedGang(
        name=GANG,
        order=LinksOrder(gang=discovery.gang(places, run_seconds=seconds)),
        pending_seconds=seconds,
        run_seconds=seconds,
        deadline_seconds=seconds,
    )


def _tell(book: Book, view: GangView) -> None:
    if view.progress is not None:
        book.tell_progress(Phase.MEASURING_LINKS, view.progress.what, view.progress.done, view.progress.total)
    else:
        book.tell_progress(Phase.MEASURING_LINKS, f"measurement: {view.what}", 0, 1)
    book.say(ConditionType.LINKS_MEASURED, "Unknown", view.reason, what=view.what)
