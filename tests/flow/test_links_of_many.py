"""Links of many nodes: sorted into kinds once, and no more of them ordered than a report has room for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flow_reports import links_report, report_of
from flow_world import World, node, spec_of

from trainwright import documents, link_sampling
from trainwright.collective_sizes import collective_sizes
from trainwright.link_sampling import links_bytes
from trainwright.orders import MAX_REPORT_BYTES, CollectiveTime, LinksOrder, LinksReport, Overlap
from trainwright_operator.flow.accept import model_of
from trainwright_operator.flow.book import Book
from trainwright_operator.flow.discovery import Discovery, inspect
from trainwright_operator.flow.links import first_gang
from trainwright_operator.flow.links_room import collectives_bytes, every_pair
from trainwright_worker.collectives import KINDS, group_stages
from trainwright_worker.seat import gang_devices

RACK = "topology.kubernetes.io/rack"


def rack_of_its_own(name: str, rack: str):
    bare = node(name)
    return node(name, labels={**bare.labels, RACK: rack})


def test_links_are_sorted_into_kinds_once_though_every_pass_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    sort = link_sampling.link_kinds
    monkeypatch.setattr(link_sampling, "link_kinds", lambda places: calls.append(1) or sort(places))
    nodes = tuple(rack_of_its_own(f"once-{number:02}", f"rack-{number}") for number in range(40))
    odd = lambda x, y: 1e6 if x == "once-07" else 1e7  # noqa: E731 - so that there is a second gang
    world = World(
        nodes=nodes,
        report=lambda order: links_report(order, odd) if isinstance(order, LinksOrder) else report_of(order),
    )
    world.run(until=lambda: world.status.cluster_ref is not None)
    for _ in range(10):
        world.step()
    assert len(calls) == 1


def named(count: int, letters: int, rack: int):
    """Nodes whose names are so long, in racks."""
    names = [f"{number:03}".rjust(letters, "n") for number in range(count)]
    return tuple(rack_of_its_own(name, f"rack-{number // rack}") for number, name in enumerate(names))


def ordered(world: World) -> list[LinksOrder]:
    """Collects the orders that workers answer; their reports must be as short as those that are taken."""
    found: list[LinksOrder] = []
    plain = world.report

    def report(order):
        answer = plain(order)
        if isinstance(order, LinksOrder):
            found.append(order)
            assert len(documents.dumps(answer)) < MAX_REPORT_BYTES
        return answer

    world.report = report
    return found


def measure(world: World) -> list[LinksOrder]:
    orders = ordered(world)
    world.run(until=lambda: world.status.links is not None)
    return orders


@pytest.mark.parametrize(("letters", "most"), [(20, 1200), (253, 640)])
def test_further_pairs_are_so_few_that_their_report_fits_however_long_names_are(letters: int, most: int) -> None:
    def report(order):
        if not isinstance(order, LinksOrder):
            return report_of(order)
        return links_report(order, lambda x, y: 1e9 + 1e9 / 3 * ((int(x[-3:]) + int(y[-3:])) % 5 + (x == y)))

    first, further = measure(World(nodes=named(120, letters, rack=60), report=report))
    assert first.pairs
    assert most * 0.8 < len(further.pairs) <= most
    assert {name for pair in further.pairs for name in pair} == {node.name for node in named(120, letters, 60)}


def test_where_all_links_of_few_nodes_do_not_fit_samples_are_measured() -> None:
    spec = spec_of(links={"allPairsUpToNodes": 40})
    for letters, is_sampled in ((63, False), (250, True)):
        (order,) = measure(World(nodes=named(40, letters, rack=20), spec=spec))
        assert (order.pairs is not None) == is_sampled
        assert order.collective_bytes


def whole_report(order: LinksOrder) -> LinksReport:
    """With the times of every collective of every kind, as long as figures get."""
    devices = gang_devices(order.gang)
    collectives = tuple(
        CollectiveTime(kind, tuple(devices[rank] for rank in ranks), size, 1 / 3000, 50)
        for stage in group_stages(order.gang)
        for ranks in stage
        for kind in KINDS
        for size in order.collective_bytes
    )
    overlaps = tuple(Overlap(one.name, 4 / 3) for one in order.gang.nodes)
    return replace(links_report(order, lambda *_: 1e10 / 3), collectives=collectives, overlaps=overlaps)


@pytest.mark.parametrize(("nodes", "letters"), [(12, 10), (40, 30), (40, 120), (12, 253)])
def test_collectives_are_of_as_many_sizes_as_the_report_has_room_for(nodes: int, letters: int) -> None:
    world = World(nodes=named(nodes, letters, rack=nodes), spec=spec_of(links={"allPairsUpToNodes": 40}))
    order = first_gang(Book(world.snapshot(), world.now), discovered(world), is_sampled=False).order
    sizes = collective_sizes(model_of(world.spec))
    assert set(order.collective_bytes) <= set(sizes)
    assert order.collective_bytes[0] == sizes[0]
    assert len(order.collective_bytes) == len(sizes) or letters > 100
    assert len(documents.dumps(whole_report(order))) < MAX_REPORT_BYTES


def test_a_report_is_about_as_long_as_it_is_taken_to_be() -> None:
    world = World(nodes=named(30, 40, rack=30))
    order = first_gang(Book(world.snapshot(), world.now), discovered(world), is_sampled=False).order
    places = [(one.name, one.slots) for one in order.gang.nodes]
    expected = links_bytes(every_pair(name for name, _ in places))
    expected += collectives_bytes(places, len(order.collective_bytes))
    assert 0.85 * expected < len(documents.dumps(whole_report(order))) < expected


def discovered(world: World) -> Discovery:
    return inspect(world.snapshot(), world.spec.devices, {}, (RACK,))
