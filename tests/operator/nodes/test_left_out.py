"""Nodes that are left out: those that the spec asks for come first, and one bad node spoils nobody's plan."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from flow_world import RESOURCE, World, node, spec_of

from trainwright_operator.flow.nodes.left_out import describe_left_out
from trainwright_operator.flow.phases.discovery import inspect_all, inspect_nodes
from trainwright_operator.flow.snapshot import NodeFacts

MEMORY, PRODUCT = "nvidia.com/gpu.memory", "nvidia.com/gpu.product"
TRAINING = {"pool": "training"}


def labelled(facts: NodeFacts, **labels: str) -> NodeFacts:
    return replace(facts, labels={**facts.labels, **labels})


def left_out(*nodes: NodeFacts, **devices: Any):
    return inspect_all(replace(World().snapshot(), nodes=nodes), spec_of(devices=devices)).left_out


def others(count: int) -> tuple[NodeFacts, ...]:
    return tuple(node(f"a{number:02}") for number in range(count))


def test_node_with_the_labels_of_the_selector_is_named_first_and_others_by_their_reason() -> None:
    mine = labelled(node("mine", schedulable=False), **TRAINING)
    described = describe_left_out(left_out(*others(54), mine, nodeSelector=TRAINING))
    assert described == (
        "mine: it is cordoned; uncordon it to use it; 54 nodes lack the label pool=training of devices.nodeSelector"
    )


@pytest.mark.parametrize(
    "mine",
    [
        node("mine", "Tesla-T4-SHARED"),
        node("mine", "Tesla-T4", ready=False),
        node("mine", "Tesla-T4", allocatable={RESOURCE: "0"}, capacity={RESOURCE: "8"}),
        labelled(node("mine", "Tesla_T4"), **{MEMORY: "some"}),
    ],
)
def test_node_of_a_product_that_the_spec_asks_for_is_named_first(mine: NodeFacts) -> None:
    found = left_out(*others(54), mine, node("zz", allocatable={}), products=["Tesla-T4"])
    assert [one.name for one in found if one.is_asked_for] == ["mine"]
    described = describe_left_out(found)
    assert described.startswith("mine: ")
    assert "54 nodes: its devices are emulated-v100, which devices.products does not list" in described
    assert described.endswith("zz: it has no nvidia.com/gpu")


def test_status_shows_the_nodes_in_the_same_order() -> None:
    mine = labelled(node("mine", schedulable=False), **TRAINING)
    bare = node("a-bare", allocatable={})
    snapshot = replace(World().snapshot(), nodes=(bare, *others(300), mine))
    status = inspect_nodes(snapshot, spec_of(devices={"nodeSelector": TRAINING})).status()
    assert [one.name for one in status.excluded_nodes][:2] == ["mine", "a00"]
    assert len(status.excluded_nodes) == 256


def test_all_nodes_count_in_a_message_however_many_are_shown() -> None:
    cpu = tuple(node(f"c{number:04}", allocatable={}) for number in range(1000))
    assert describe_left_out(left_out(*cpu)) == "1,000 nodes have no nvidia.com/gpu"
    described = describe_left_out(left_out(*(replace(one, schedulable=False) for one in others(20)), *cpu))
    assert described.endswith("a04: it is cordoned; uncordon it to use it; and 1,015 more")
    assert describe_left_out(()) == "the cluster has no nodes"


def test_waiting_plan_names_the_node_that_it_asks_for() -> None:
    mine = labelled(node("mine", schedulable=False), **TRAINING)
    world = World(spec=spec_of(devices={"nodeSelector": TRAINING}), nodes=(*others(54), mine))
    world.run(until=lambda: world.status.waiting is not None)
    found = world.condition("NodesDiscovered")
    assert found.reason == "NoUsableNodes"
    assert found.message.startswith("no node has usable devices; mine: it is cordoned")
    assert world.status.cluster.excluded_nodes[0].name == "mine"


BAD: dict[str, dict[str, Any]] = {
    "memory": {"labels": {PRODUCT: "emulated-v100", MEMORY: "1" + "0" * 23}},
    "very long memory": {"labels": {PRODUCT: "emulated-v100", MEMORY: "9" * 5000}},
    "memory of another alphabet": {"labels": {PRODUCT: "emulated-v100", MEMORY: "١٦٣٨٤"}},
    "memory of its type": {"labels": {PRODUCT: "emulated-v100", MEMORY: "2048"}},
    "count": {"allocatable": {RESOURCE: "1G"}},
    "product": {"labels": {PRODUCT: "emulated-" + "x" * 300, MEMORY: "16384"}},
    "letters": {"labels": {PRODUCT: "emulated-\u202e{what}\n", MEMORY: "16384"}},
    "zone": {"labels": {PRODUCT: "emulated-v100", MEMORY: "16384", "topology.kubernetes.io/zone": "z\n" * 100}},
    "table": {"annotations": {"trainwright.dev/emulation": '{"flops_per_second": 1e-300}'}},
    "speed": {
        "annotations": {
            "trainwright.dev/emulation": json.dumps(
                {"flops_per_second": 1e-9, "floor_seconds": 1e20, "updated_parameters_per_second": 1e-9}
            )
        }
    },
}


@pytest.mark.parametrize("what", BAD)
def test_one_bad_node_spoils_nobodys_plan(what: str) -> None:
    spec = spec_of(trials={"topK": 0}, links={"topologyLabels": ["topology.kubernetes.io/zone"]})
    world = World(spec=spec, nodes=(replace(node("a-bad"), **BAD[what]), *World().nodes))
    world.run()
    assert world.succeeded == "True", world.condition("Succeeded")
    assert [one.name for one in world.status.cluster.nodes] == ["n1", "n2", "n3"]
    (shown,) = world.status.cluster.excluded_nodes
    assert shown.name == "a-bad"
    assert shown.reason.isprintable()
    assert len(shown.reason) < 500


def test_stored_value_of_a_node_that_cannot_be_is_told_with_the_node_its_label_and_the_value() -> None:
    world = World()
    world.run(until=lambda: len(world.stored) > 1)
    name = next(name for name in world.stored if name.endswith("-discovery"))
    document = json.loads(world.stored[name].data["document.json"])
    document["accelerators"][0]["memory_bytes"] = 10**29
    world.stored[name] = replace(world.stored[name], data={"document.json": json.dumps(document)})
    world.nodes = (replace(world.nodes[0], **BAD["memory"]), *world.nodes[1:])
    world.run()
    found = world.condition("NodesDiscovered")
    assert found.reason == "StoredDocumentInvalid"
    assert "worker" not in found.message
    assert f"ConfigMap {name}: accelerators.0" in found.message
    assert f"n1: its label {MEMORY} (in MiB) is '1{'0' * 23}'" in found.message


def test_node_with_more_devices_than_machines_have_is_named_where_a_plan_sees_too_many() -> None:
    world = World(nodes=(*(node(f"n{number:03}", devices=8) for number in range(400)), node("odd", devices=1000)))
    world.run()
    found = world.condition("NodesDiscovered")
    assert (found.status, found.reason) == ("False", "SpecInvalid")
    assert "4200 usable devices (1000 on odd alone)" in found.message
