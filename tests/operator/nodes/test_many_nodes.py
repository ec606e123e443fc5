"""Passes over plans on thousands of nodes: each looks at a node, and reads a long document, a few times at most."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from flow_world import World, node

from trainwright import documents
from trainwright.cluster import Link, Node
from trainwright.worker_api import LinkReport
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.documents.link_results import report_of_nodes

COUNT = 600


class CountedNodes(tuple):  # noqa: SLOT001 - it counts on the class
    """Nodes that count how often they are walked through."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        CountedNodes.walks += 1
        return super().__iter__()


@pytest.fixture
def world() -> World:
    return World(nodes=tuple(node(f"node-{number:04}") for number in range(COUNT)))


def test_choice_of_a_node_to_profile_on_walks_through_the_nodes_few_times(world: World) -> None:
    world.run(until=lambda: "LinksMeasured" in {c.type for c in world.status.conditions if c.status == "True"})
    world.nodes = CountedNodes(world.nodes)
    CountedNodes.walks = 0
    world.step()
    assert any("profile-1" in name for name in world.jobs)
    assert CountedNodes.walks < 10


def test_long_documents_and_device_tables_are_read_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run(until=lambda: bool(world.jobs))
    read = []
    parse = documents.parse

    def counted(data: Any, noun: Any, **options: Any) -> Any:
        read.append(noun)
        return parse(data, noun, **options)

    monkeypatch.setattr(documents, "parse", counted)
    for _ in range(3):
        world.decide()
    assert DiscoveredDevices not in read
    assert len(read) < COUNT / 10


def test_report_of_few_links_is_not_compared_with_all_pairs_of_nodes() -> None:
    nodes = tuple(Node(f"node-{number}", "t4", 1) for number in range(1000))
    tracemalloc.start()
    try:
        assert report_of_nodes(LinkReport((Link("node-1", "node-2", 0.0, 1e9),)), nodes) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1e6
