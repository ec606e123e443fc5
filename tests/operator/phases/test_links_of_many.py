"""Links of many nodes: grouped into kinds once, and limited to what a report can hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flow_reports import links_report, report_of
from flow_world import World, node, spec_of

from trainwright import documents
from trainwright.measurement import link_sampling
from trainwright.measurement.collective_check import collective_sizes
from trainwright.measurement.link_sampling import links_bytes
from trainwright.worker_api import MAX_REPORT_BYTES, CollectiveTime, LinkReport, LinkTask, Overlap
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.documents.link_results import all_pairs, collective_report_bytes
from trainwright_operator.flow.documents.number_formats import model_from_spec
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.phases.discovery import inspect_nodes
from trainwright_operator.flow.phases.links import main_gang
from trainwright_worker.gang.rank_assignment import gang_devices
from trainwright_worker.measure.collective_bench import concurrent_group_sets

RACK = "topology.kubernetes.io/rack"


def rack_of_its_own(name: str, rack: str):
    bare = node(name)
    return node(name, labels={**bare.labels, RACK: rack})


def test_link_kinds_are_computed_once_for_all_reconciliations(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    sort = link_sampling.link_kinds
    monkeypatch.setattr(link_sampling, "link_kinds", lambda places: calls.append(1) or sort(places))
    nodes = tuple(rack_of_its_own(f"once-{number:02}", f"rack-{number}") for number in range(40))
    odd = lambda x, y: 1e6 if x == "once-07" else 1e7  # noqa: E731 (so that there is a second gang)
    world = World(
        nodes=nodes,
        report=lambda order: links_report(order, odd) if isinstance(order, LinkTask) else report_of(order),
    )
    world.run(until=lambda: world.status.cluster_ref is not None)
    for _ in range(10):
        world.step()
    assert len(calls) == 1


def named(count: int, letters: int, rack: int):
    """Return nodes in racks, with names of the given length."""
    names = [f"{number:03}".rjust(letters, "n") for number in range(count)]
    return tuple(rack_of_its_own(name, f"rack-{number // rack}") for number, name in enumerate(names))


def ordered(world: World) -> list[LinkTask]:
    """Collect the tasks that workers report on; check that the reports are short enough to be accepted."""
    found: list[LinkTask] = []
    plain = world.report

    def report(order):
        answer = plain(order)
        if isinstance(order, LinkTask):
            found.append(order)
            assert len(documents.dumps(answer)) < MAX_REPORT_BYTES
        return answer

    world.report = report
    return found


def measure(world: World) -> list[LinkTask]:
    orders = ordered(world)
    world.run(until=lambda: world.status.links is not None)
    return orders


@pytest.mark.parametrize(("letters", "most"), [pytest.param(20, 1200, marks=pytest.mark.slow), (253, 640)])
def test_additional_pairs_are_limited_by_the_report_size(letters: int, most: int) -> None:
    def report(order):
        if not isinstance(order, LinkTask):
            return report_of(order)
        return links_report(order, lambda x, y: 1e9 + 1e9 / 3 * ((int(x[-3:]) + int(y[-3:])) % 5 + (x == y)))

    first, further = measure(World(nodes=named(120, letters, rack=60), report=report))
    assert first.pairs
    assert most * 0.8 < len(further.pairs) <= most
    assert {name for pair in further.pairs for name in pair} == {node.name for node in named(120, letters, 60)}


def test_samples_are_measured_when_all_links_exceed_the_report() -> None:
    spec = spec_of(links={"allPairsUpToNodes": 40})
    for letters, is_sampled in ((63, False), (250, True)):
        (order,) = measure(World(nodes=named(40, letters, rack=20), spec=spec))
        assert (order.pairs is not None) == is_sampled
        assert order.collective_bytes


def whole_report(order: LinkTask) -> LinkReport:
    """Return a report with the times of every collective of every kind, with the longest possible figures."""
    devices = gang_devices(order.gang)
    collectives = tuple(
        CollectiveTime(kind, tuple(devices[rank] for rank in ranks), size, 1 / 3000, 50)
        for stage in concurrent_group_sets(order.gang)
        for ranks in stage
        for kind in order.collectives
        for size in order.collective_bytes
    )
    overlaps = tuple(Overlap(one.name, 4 / 3) for one in order.gang.nodes)
    return replace(links_report(order, lambda *_: 1e10 / 3), collectives=collectives, overlaps=overlaps)


@pytest.mark.parametrize(("nodes", "letters"), [(12, 10), (40, 30), (40, 120), (12, 253)])
def test_collective_sizes_are_limited_by_the_report_size(nodes: int, letters: int) -> None:
    spec = spec_of(links={"allPairsUpToNodes": 40}, search={"planner": "Alpa"})
    world = World(nodes=named(nodes, letters, rack=nodes), spec=spec)
    order = main_gang(ReconcileContext(world.snapshot(), world.now), discovered(world), is_sampled=False).task
    sizes = collective_sizes(model_from_spec(world.spec))
    assert set(order.collective_bytes) <= set(sizes)
    assert order.collective_bytes[0] == sizes[0]
    assert len(order.collective_bytes) == len(sizes) or letters > 100
    assert len(documents.dumps(whole_report(order))) < MAX_REPORT_BYTES


def test_report_length_is_near_its_estimate() -> None:
    world = World(nodes=named(30, 40, rack=30))
    order = main_gang(ReconcileContext(world.snapshot(), world.now), discovered(world), is_sampled=False).task
    places = [(one.name, one.slots) for one in order.gang.nodes]
    expected = links_bytes(all_pairs(name for name, _ in places))
    expected += collective_report_bytes(places, len(order.collectives) * len(order.collective_bytes))
    assert 0.85 * expected < len(documents.dumps(whole_report(order))) < expected


def discovered(world: World) -> DiscoveredDevices:
    return inspect_nodes(world.snapshot(), world.spec)
