"""LinksMeasured: every pair of few nodes, samples of many, doubts that samples leave, and their resolution."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
from flow_reports import links_report, log_of, report_of
from flow_world import World, node, spec_of

from trainwright import documents
from trainwright.cluster import Cluster
from trainwright.measurement.collective_check import collective_sizes
from trainwright.runtime import Runtime
from trainwright.worker_api import MAX_REPORT_BYTES, LinkTask
from trainwright_operator.flow.actions import StartPlanner
from trainwright_operator.flow.documents import link_results
from trainwright_operator.flow.documents.number_formats import model_from_spec
from trainwright_operator.search_process import search

RACK = "topology.kubernetes.io/rack"


def many(count: int, rack: int = 10, product: str = "emulated-v100", devices: int = 2):
    """Return nodes in racks."""
    bare = [node(f"n{number:03}", product, devices) for number in range(count)]
    return tuple(
        node(facts.name, product, devices, labels={**facts.labels, RACK: f"rack-{number // rack}"})
        for number, facts in enumerate(bare)
    )


def reporting(rate):
    """Return reports of workers whose links have the bandwidth that `rate` gives, by the nodes' numbers."""
    by_name = lambda x, y: rate(int(x[1:]), int(y[1:]))  # noqa: E731
    return lambda order: links_report(order, by_name) if isinstance(order, LinkTask) else report_of(order)


def measured(world: World) -> bool:
    found = world.condition("LinksMeasured")
    return found is not None and found.status == "True"


def order_of(world: World, gang: str) -> LinkTask:
    """Return the task of a gang while it runs."""
    world.run(until=lambda: any(stored.role == "order" and stored.gang == gang for stored in world.stored.values()))
    stored = next(stored for stored in world.stored.values() if stored.role == "order" and stored.gang == gang)
    return documents.loads(stored.data["order.json"], LinkTask)


def cluster_of(world: World) -> Cluster:
    world.run(until=lambda: world.status.cluster_ref is not None)
    return documents.loads(world.stored[world.status.cluster_ref.config_map].data["document.json"], Cluster)


def test_all_node_pairs_are_measured_in_small_clusters() -> None:
    world = World(nodes=many(4), spec=spec_of(links={"allPairsUpToNodes": 4}))
    order = order_of(world, "links")
    assert order.pairs is None
    assert len(order.gang.nodes) == 4
    world.run(until=lambda: measured(world))
    assert (world.status.links.measured, world.status.links.inferred) == (4 * 3 + 4, 0)
    assert "links-further" not in {stored.gang for stored in world.stored.values()}


def test_samples_represent_links_of_their_kind_in_large_clusters() -> None:
    world = World(nodes=many(40), report=reporting(lambda a, b: 1e8 if a == b else 1e7 if a // 10 == b // 10 else 1e6))
    order = order_of(world, "links")
    assert len(order.pairs) == 2 * (4 + 6)
    assert {node.name for node in order.gang.nodes} >= {name for pair in order.pairs for name in pair}
    assert len(order.gang.nodes) <= 16
    assert {len(node.slots) for node in order.gang.nodes} == {2}
    cluster = cluster_of(world)
    pairs = list(combinations(range(40), 2))
    for a, b in pairs:
        rate = cluster.link(f"n{a:03}", f"n{b:03}").bandwidth_bytes_per_second
        assert rate == (1e7 if a // 10 == b // 10 else 1e6)
    found = world.status.links
    assert found.measured == 40 + len(order.gang.nodes)
    assert found.measured + found.inferred == 2 * len(pairs) + 40
    assert found.unlike_kinds == ()
    message = world.condition("LinksMeasured").message
    assert f"{found.measured} directed links measured; {found.inferred} inferred from links of the same kind" in message
    assert not any("links-further" in name for name in world.created)


def in_domains(nodes, domains):
    """Return the nodes with the label of GPU feature discovery for their NVLink domains."""
    return tuple(
        replace(facts, labels={**facts.labels, "nvidia.com/gpu.clique": domain})
        for facts, domain in zip(nodes, domains, strict=True)
    )


def test_links_in_an_nvlink_domain_and_between_domains_are_both_sampled() -> None:
    nodes = in_domains(many(20, rack=20), [f"f81d4fae-7dec.{number // 10}" for number in range(20)])
    world = World(nodes=nodes, report=reporting(lambda a, b: 1e8 if a // 10 == b // 10 else 1e6))
    order = order_of(world, "links")
    assert {int(a[1:]) // 10 == int(b[1:]) // 10 for a, b in order.pairs} == {True, False}
    cluster = cluster_of(world)
    for a, b in combinations(range(20), 2):
        rate = cluster.link(f"n{a:03}", f"n{b:03}").bandwidth_bytes_per_second
        assert rate == (1e8 if a // 10 == b // 10 else 1e6)
    assert world.status.links.unlike_kinds == ()


def test_nodes_without_an_nvlink_domain_are_as_before() -> None:
    plain = many(14)
    zeros = in_domains(plain, ["00000000-0000-0000-0000-000000000000.0"] * 14)
    stored = []
    for nodes in (plain, zeros):
        world = World(nodes=nodes)
        world.run(until=lambda: any(name.endswith("-discovery") for name in world.stored))  # noqa: B023
        stored += [one.data["document.json"] for name, one in world.stored.items() if name.endswith("-discovery")]
    assert stored[0] == stored[1]
    assert "nvlink_domain" not in stored[0]


def test_second_gang_measures_all_links_of_a_kind_that_differs() -> None:
    """The labels of rack 1 are wrong: half of it is elsewhere."""
    world = World(
        nodes=many(20), report=reporting(lambda a, b: 1e6 if (min(a, b) < 15 <= max(a, b)) and min(a, b) > 9 else 1e7)
    )
    order = order_of(world, "links-further")
    names = [f"n{number:03}" for number in range(10, 20)]
    assert {node.name for node in order.gang.nodes} == set(names)
    assert {len(node.slots) for node in order.gang.nodes} == {1}
    assert len(order.pairs) == 45 - 2
    assert (order.collective_bytes, order.overlap) == ((), False)
    cluster = cluster_of(world)
    for a, b in combinations(range(10, 20), 2):
        assert cluster.link(f"n{a:03}", f"n{b:03}").bandwidth_bytes_per_second == (1e6 if a < 15 <= b else 1e7)
    (kind,) = world.status.links.unlike_kinds
    assert kind == "among ?/rack-1/2 × emulated-v100"
    assert f"links differ within a kind, so more were measured: {kind}" in world.condition("LinksMeasured").message


def test_differing_internal_links_are_measured_on_all_nodes_of_the_machine_type() -> None:
    world = World(nodes=many(14, rack=14), report=reporting(lambda a, b: 1e7 if a != b else 1e8 if a == 1 else 1e9))
    sampled = {node.name for node in order_of(world, "links").gang.nodes}
    order = order_of(world, "links-further")
    assert order.pairs == ()
    assert {node.name for node in order.gang.nodes} == {f"n{number:03}" for number in range(14)} - sampled
    assert {node.slots for node in order.gang.nodes} == {(0, 1)}
    cluster = cluster_of(world)
    insides = [cluster.link(node.name, node.name).bandwidth_bytes_per_second for node in cluster.nodes]
    assert insides == [1e8 if number == 1 else 1e9 for number in range(14)]
    assert world.status.links.unlike_kinds == ("inside 2 × emulated-v100",)


def test_node_locations_stay_when_labels_change_after_discovery() -> None:
    world = World(nodes=many(20))
    world.run(until=lambda: any(name.endswith("-links-result") for name in world.stored))
    world.nodes = tuple(node(facts.name) for facts in world.nodes)
    world.run(until=lambda: measured(world))
    assert world.succeeded == "Unknown"


def test_discovery_of_a_previous_version_has_only_machine_types() -> None:
    world = World(nodes=many(20))
    while not world.stored:
        world.step()
    name = next(name for name in world.stored if name.endswith("-discovery"))
    document = json.loads(world.stored[name].data["document.json"])
    assert len(document.pop("places")) == 20
    world.stored[name] = replace(world.stored[name], data={"document.json": json.dumps(document)})
    assert len(order_of(world, "links").pairs) == 2
    world.run(until=lambda: measured(world))


def test_condition_names_the_assumption_when_too_many_links_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(link_results.sampled_cluster, max_bytes=950_000)
    monkeypatch.setattr(link_results, "sampled_cluster", small)
    world = World(nodes=many(130, rack=65), report=reporting(lambda a, b: 1e7 if a // 65 == b // 65 else 1e6))
    cluster = cluster_of(world)
    assert cluster.links == ()
    assert cluster.link("n000", "n001").bandwidth_bytes_per_second == 1e6
    assert "every node is assumed to be as slow as its slowest link" in world.condition("LinksMeasured").message


def test_custom_topology_labels_and_machine_types_define_link_kinds() -> None:
    bare = [node(f"n{number:03}", "emulated-t4" if number < 10 else "emulated-v100") for number in range(20)]
    nodes = tuple(
        node(facts.name, facts.labels["nvidia.com/gpu.product"], labels={**facts.labels, "block": str(number % 2)})
        for number, facts in enumerate(bare)
    )
    for labels, kinds in (([], 3), (["block"], 10)):
        order = order_of(World(nodes=nodes, spec=spec_of(links={"topologyLabels": labels})), "links")
        assert len(order.pairs) == 2 * kinds


def test_operator_repeats_no_link_measurement_after_a_restart() -> None:
    odd = reporting(lambda a, b: 1e6 if 11 in (a, b) else 1e7)
    world = World(nodes=many(20), report=odd, spec=spec_of(trials={"topK": 0}))
    for step in range(200):
        if step % 3 == 0:
            world.restart()
        world.step()
        if measured(world):
            break
    assert measured(world)
    for gang in ("links", "links-further"):
        assert sum(name.endswith(f"-{gang}-order") for name in world.created) == 1
    assert not world.jobs or not any("links" in job.gang for job in world.jobs.values())


def test_link_report_is_invalid_when_a_sample_is_missing() -> None:
    def report(order):
        found = report_of(order)
        return type(found)(found.links[2:]) if isinstance(order, LinkTask) else found

    world = World(nodes=many(20), report=report)
    world.run()
    assert world.condition("LinksMeasured").reason == "ReportInvalid"
    assert "stands for its kind" in world.condition("LinksMeasured").message


def test_plan_fails_with_the_reason_of_the_second_gang() -> None:
    odd = reporting(lambda a, b: 1e6 if 11 in (a, b) else 1e7)
    world = World(
        nodes=many(20),
        report=odd,
        log=lambda order: (
            "" if getattr(order, "overlap", None) is False and order.pairs and len(order.pairs) > 20 else None
        ),
    )
    world.run()
    assert world.condition("LinksMeasured").reason == "MetricsUnavailable"


@pytest.mark.parametrize("rack", [32, 8])
def test_links_of_500_nodes_need_few_pods_and_small_documents(rack: int) -> None:
    rates = reporting(lambda a, b: 1e7 if a // rack == b // rack else 0.95e7)
    world = World(nodes=many(500, rack, devices=8), report=rates)
    order = order_of(world, "links")
    assert len(order.gang.nodes) <= 64
    assert len(order.pairs) <= 300
    assert len(log_of(rates(order))) < MAX_REPORT_BYTES
    world.run(until=lambda: measured(world))
    assert len(documents.dumps(cluster_of(world))) < 500_000


def test_collectives_of_the_model_are_measured_compared_and_reported() -> None:
    world = World(spec=spec_of(trials={"topK": 0}))
    order = order_of(world, "links")
    assert order.collective_bytes == collective_sizes(model_from_spec(world.spec))
    world.run(until=lambda: measured(world))
    message = world.condition("LinksMeasured").message
    assert f"({len(order.collective_bytes)} measured, mean error" in message
    assert "for all_reduce of" in message
    found = world.status.links
    assert 0 < found.collective_error <= abs(found.worst_collective_error)
    off = order_of(World(spec=spec_of(links={"collectives": False})), "links")
    assert off.collective_bytes == ()


def test_all_to_alls_are_measured_when_plans_may_shard_operators() -> None:
    alpa = {"planner": "Alpa"}
    assert order_of(World(spec=spec_of(search=alpa)), "links").all_to_all
    assert not order_of(World(), "links").all_to_all
    assert not order_of(World(spec=spec_of(search=alpa, links={"collectives": False})), "links").all_to_all


def test_overlap_slowdown_is_measured_on_real_devices_and_used_by_the_search() -> None:
    emulated = World()
    assert not order_of(emulated, "links").overlap
    world = World(nodes=(node("n1", "Tesla-T4"), node("n2", "Tesla-T4")), spec=spec_of(trials={"topK": 0}))
    order = order_of(world, "links")
    assert order.overlap
    assert order.overlap_dtype is model_from_spec(world.spec).dtype
    asked = []
    for _ in range(300):
        asked += [action.request for action in world.step() if isinstance(action, StartPlanner)]
    assert world.succeeded == "True"
    assert documents.loads(asked[0].runtime, Runtime).overlap_slowdown_ratio == 1.2
    assert world.status.links.overlap_slowdown == 1.2
    assert "computation takes 1.2 times as long during communication" in world.condition("LinksMeasured").message
    without = World(nodes=world.nodes, spec=spec_of(links={"overlap": False}))
    assert not order_of(without, "links").overlap


def test_overlap_slowdown_below_one_counts_as_one() -> None:
    def report(order):
        found = report_of(order)
        if not isinstance(order, LinkTask):
            return found
        fast = [replace(one, compute_slowdown_ratio=0.9) for one in found.overlaps]
        return type(found)(found.links, found.collectives, tuple(fast))

    world = World(nodes=(node("n1", "Tesla-T4"), node("n2", "Tesla-T4")), report=report)
    asked = []
    for _ in range(300):
        asked += [action.request for action in world.step() if isinstance(action, StartPlanner)]
        if asked:
            break
    assert json.loads(asked[0].runtime)["overlap_slowdown_ratio"] == 1.0
    assert search(asked[0])
