"""Plans under way across a change of how nodes are read: what says the same as before stays theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flow_world import RESOURCE, World, node, spec_of

from trainwright_operator.flow.nodes import device_types
from trainwright_operator.flow.phases.discovery import find_lost_nodes, inspect_nodes
from trainwright_operator.flow.snapshot import NodeFacts

LABEL = "nvidia.com/gpu.product"
OLD, NEW = "V100-SXM2-16GB", "Tesla-V100-SXM2-16GB"


def named(name: str, product: str = OLD) -> NodeFacts:
    return node(name, product)


def as_before(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Read nodes as a version did that knew neither data sheets' names nor virtual GPUs."""
    monkeypatch.setattr(device_types, "sheet_name", lambda product, memory_bytes: product)
    monkeypatch.setattr(device_types, "find_share", lambda *_, **__: "")
    return monkeypatch


@pytest.mark.parametrize("product", [OLD, "GRID-A100-16C"])
def test_plan_goes_on_with_the_names_and_nodes_of_a_former_version(
    product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(nodes=(named("n1", product), named("n2", product)))
    with monkeypatch.context() as former:
        as_before(former)
        world.run(until=lambda: any(job.gang == "candidate-1" for job in world.jobs.values()))
    created = len(world.created)
    world.run()
    assert world.succeeded == "True", world.condition("Succeeded")
    assert [one.accelerator for one in world.status.cluster.nodes] == [product, product]
    assert (world.status.cluster.revision, world.status.cluster.change) == (1, None)
    assert not [name for name in world.created[created:] if "-profile-" in name or "-links" in name]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"labels": {LABEL: "Tesla-T4", "nvidia.com/gpu.memory": "16384"}}, "2 × Tesla-T4 instead of 2 × V100"),
        (
            {"labels": {LABEL: OLD, "nvidia.com/gpu.memory": "32768"}},
            f"the memory or device table of its {OLD} changed",
        ),
        ({"labels": {LABEL: f"{OLD}-SHARED", "nvidia.com/gpu.memory": "16384"}}, "time-sliced"),
        ({"allocatable": {RESOURCE: "4"}}, f"4 × {NEW} instead of 2 × {OLD}"),
        ({"allocatable": {}}, "it has no nvidia.com/gpu"),
        ({"ready": False}, "it is not ready"),
    ],
)
def test_a_change_of_a_node_with_a_former_name_still_counts(
    changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = replace(World().snapshot(), nodes=(named("n1"),))
    with monkeypatch.context() as former:
        discovery = inspect_nodes(as_before(former) and snapshot, spec_of())
    assert find_lost_nodes(snapshot, spec_of(), discovery) == {}
    changed = replace(snapshot, nodes=(replace(named("n1"), **changes),))
    assert words in find_lost_nodes(changed, spec_of(), discovery)["n1"]


def test_nodes_discovered_anew_have_the_data_sheets_names() -> None:
    found = inspect_nodes(replace(World().snapshot(), nodes=(named("n1"), named("n2", NEW))), spec_of())
    assert [one.name for one in found.accelerators] == [NEW]


@pytest.mark.parametrize("others", [["n2"], ["n2", "n3"]])
def test_nodes_whose_driver_tells_another_memory_keep_the_name_that_they_write(others: list[str]) -> None:
    """Former drivers wrote other names and less memory of the same device; two types are better than a node left out."""
    less = {"nvidia.com/gpu.memory": "16160"}
    former = [replace(one, labels=one.labels | less) for one in (named("n1"), named("n4"))]
    snapshot = replace(World().snapshot(), nodes=(*former, *(named(name, NEW) for name in others)))
    found = inspect_nodes(snapshot, spec_of())
    assert {one.name: one.accelerator for one in found.nodes} == dict.fromkeys(("n1", "n4"), OLD) | dict.fromkeys(
        others, NEW
    )
    assert {one.name: one.memory_bytes >> 20 for one in found.accelerators} == {OLD: 16160, NEW: 16384}
    assert find_lost_nodes(snapshot, spec_of(), found) == {}
    priced = found.with_prices({NEW: 2.5}).accelerators
    assert [one.price_per_hour for one in priced] == [2.5, 2.5]


def test_node_whose_driver_tells_another_memory_under_the_same_name_is_left_out_with_both_figures() -> None:
    less = replace(named("n1", NEW), labels=named("n1", NEW).labels | {"nvidia.com/gpu.memory": "16160"})
    found = inspect_nodes(replace(World().snapshot(), nodes=(less, named("n2", NEW), named("n3", NEW))), spec_of())
    (left_out,) = found.excluded
    assert left_out.reason == (
        f"its {NEW} have 16,160 MiB each, and those of other nodes 16,384 MiB; run one version of the driver on all of them, "
        "correct the figure that is wrong, or choose nodes by devices.nodeSelector"
    )


@pytest.mark.parametrize("name", [OLD, NEW])
def test_products_and_prices_of_a_plan_have_either_name(name: str) -> None:
    spec = spec_of(devices={"products": [name], "pricesPerHour": {name: 2.5}})
    found = inspect_nodes(replace(World().snapshot(), nodes=(named("n1"),)), spec)
    assert [one.accelerator for one in found.nodes] == [NEW]
    assert found.with_prices(spec.devices.prices_per_hour).accelerators[0].price_per_hour == 2.5
