"""Links of many nodes: sorted into kinds once, and no more of them ordered than a report has room for."""

from __future__ import annotations

import pytest
from flow_world import World, links_report, node, report_of

from trainwright import link_sampling
from trainwright.orders import LinksOrder

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
    world = World(nodes=nodes, report=lambda order: links_report(order, odd) if isinstance(order, LinksOrder) else report_of(order))
    world.run(until=lambda: world.status.cluster_ref is not None)
    for _ in range(10):
        world.step()
    assert len(calls) == 1
