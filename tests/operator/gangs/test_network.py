"""Network devices (EFA, InfiniBand) that pods of gangs ask for beside their accelerators."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from flow_harm import running
from flow_queue import SimulatedQueue, flavor, queue_of
from flow_world import RESOURCE, World, node, spec_of

from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.nodes.network_devices import is_network_device, offered_network, pod_amount
from trainwright_operator.flow.nodes.published_devices import used_network
from trainwright_operator.flow.snapshot import NodeFacts, QueueFacts, Snapshot
from trainwright_operator.kube import object_facts
from trainwright_operator.kube.queue_reader import queue_facts

EFA, IB = "vpc.amazonaws.com/efa", "rdma/hca_shared_devices_a"


def with_cards(facts: NodeFacts, **cards: int) -> NodeFacts:
    """Return the node with EFA cards, and shares of InfiniBand."""
    names = {"efa": EFA, "ib": IB}
    return replace(facts, allocatable={**facts.allocatable, **{names[key]: str(count) for key, count in cards.items()}})


def efa_nodes(cards: int = 8) -> tuple[NodeFacts, ...]:
    return tuple(with_cards(one, efa=cards) for one in (node("n1"), node("n2"), node("n3", "emulated-t4")))


def asked(world: World, gang: str) -> dict[str, dict[str, str]]:
    """Return what the gang's pods limit, by pod, besides the accelerators."""
    limits = {
        name: world.templates[name]["containers"][0]["resources"]
        for name, pod in world.pods.items()
        if pod.gang == gang
    }
    assert all(one["limits"].items() <= one["requests"].items() for one in limits.values())
    return {name: {key: n for key, n in one["limits"].items() if key != RESOURCE} for name, one in limits.items()}


def until_running(gang: str, **fields: Any) -> World:
    world = World(**fields)
    world.run(until=lambda: running(world, gang))
    return world


@pytest.mark.parametrize(
    ("name", "offered", "used", "devices", "amount"),
    [
        (EFA, 32, 4, 8, 16),  # half of a p5
        (EFA, 32, 8, 8, 32),
        (EFA, 32, 8, 7, 32),  # a GPU of the p5 is broken
        (EFA, 4, 8, 8, 4),  # a p4d
        (EFA, 4, 3, 8, 1),  # rounded down: 5 others get 2
        (EFA, 4, 1, 8, 1),  # without any the gang would send over TCP
        ("nvidia.com/sriov-rdma-vf", 16, 2, 8, 4),
        ("rdma/ib", 8, 4, 8, 4),
        (IB, 100, 4, 8, 1),  # shares, each of which gives all cards
    ],
)
def test_pod_asks_for_its_part_of_the_nodes_cards(
    name: str, offered: int, used: int, devices: int, amount: int
) -> None:
    assert pod_amount(name, offered, used_devices=used, node_devices=devices) == amount


@pytest.mark.parametrize(
    ("name", "known"),
    [
        (EFA, True),
        ("rdma/ib", True),
        (IB, True),
        ("nvidia.com/hostdev", True),
        ("nvidia.com/rdma_host_dev", True),
        ("nvidia.com/mlnxnics", True),
        ("nvidia.com/sriov-rdma-vf", True),
        ("nvidia.com/sriov_resource_rail_0", True),
        ("nvidia.com/resibs1", True),
        ("openshift.io/mlx_rdma", True),
        ("nvidia.com/gpu", False),
        ("nvidia.com/gpu.shared", False),
        ("nvidia.com/mig-1g.5gb", False),
        ("openshift.io/sriovlegacy", True),
        ("networking.gke.io.networks/rdma-0", False),
        ("hugepages-2Mi", False),
    ],
)
def test_network_devices_are_known_by_the_names_of_their_plugins(name: str, known: bool) -> None:
    assert is_network_device(name) is known
    offering = replace(node("n"), allocatable={name: "4", RESOURCE: "8"})
    assert offered_network(offering) == ({name: 4} if known else {})
    assert offered_network(replace(offering, allocatable={name: "0"})) == {}


@pytest.mark.usefixtures("each_launcher")
def test_gangs_of_several_nodes_ask_for_what_their_nodes_offer() -> None:
    world = World(nodes=efa_nodes())
    if world.spec.queue_name:
        world.queue = SimulatedQueue(replace(world.queue.facts, network_quota={EFA: None}))
    seen: dict[str, list[dict[str, str]]] = {}

    def look() -> bool:
        for gang in {pod.gang for pod in world.pods.values()}:
            seen[gang] = list(asked(world, gang).values())
        return world.succeeded == "True"

    world.run(until=look)
    assert seen["links"] == [{EFA: "8"}] * 3  # both devices of a node
    assert seen["profile-1"] == [{}]
    assert seen["candidate-1"]
    trials = [pods for gang, pods in seen.items() if gang.startswith(("candidate", "baseline"))]
    assert all(pods == [{}] if len(pods) == 1 else all(EFA in pod for pod in pods) for pods in trials)
    assert f"gangs of several nodes ask for {EFA}" in world.condition("NodesDiscovered").message


@pytest.mark.usefixtures("each_launcher")
def test_gang_with_a_node_without_cards_asks_for_none() -> None:
    nodes = efa_nodes()
    world = until_running("links", nodes=(*nodes[:2], node("n3", "emulated-t4")))
    assert list(asked(world, "links").values()) == [{}] * 3
    if not world.spec.queue_name:
        words = f"only gangs of nodes that all offer {EFA} ask for it, and n3 do"
        assert words in world.condition("NodesDiscovered").message


def test_pods_of_nodes_with_unlike_cards_ask_for_their_own() -> None:
    nodes = (with_cards(node("n1"), efa=8), with_cards(node("n2"), efa=2))
    for kind in LauncherKind:
        world = until_running("links", nodes=nodes, spec=spec_of(launcher=kind))
        assert sorted(one[EFA] for one in asked(world, "links").values()) == ["2", "8"]


def test_plan_without_network_devices_says_so() -> None:
    world = until_running("links", nodes=efa_nodes(), spec=spec_of(devices={"network": "None"}))
    assert list(asked(world, "links").values()) == [{}] * 3
    assert f"devices.network is None, so no pod asks for {EFA}" in world.condition("NodesDiscovered").message


def template(**amounts: str) -> dict[str, Any]:
    limits = {"efa": EFA, "ib": IB}
    resources = {"limits": {limits[key]: amount for key, amount in amounts.items()}}
    return {"podTemplate": {"spec": {"containers": [{"name": "pytorch", "resources": resources}]}}}


@pytest.mark.parametrize("own", [{"efa": "1"}, {"ib": "1"}])
def test_network_devices_of_the_users_pod_template_win(own: dict[str, str]) -> None:
    world = until_running("links", nodes=efa_nodes(), spec=spec_of(worker=template(**own)))
    for pod in world.pods.values():
        limits = world.templates[pod.name]["containers"][0]["resources"]["limits"]
        assert {key: n for key, n in limits.items() if key != RESOURCE} == {
            {"efa": EFA, "ib": IB}[key]: n for key, n in own.items()
        }
    assert "worker.podTemplate asks for network devices itself" in world.condition("NodesDiscovered").message


def queued(**network: int | None) -> World:
    quota = {EFA: network["efa"]} if network else {}
    facts = replace(queue_of(flavor("emulated-v100", 4), flavor("emulated-t4", 2)), network_quota=quota)
    return World(nodes=efa_nodes(), spec=spec_of(queueName="research"), queue=SimulatedQueue(facts))


@pytest.mark.parametrize(
    ("network", "amounts", "words"),
    [
        ({}, {}, "research does not cover; add it to coveredResources, with a quota for all 24"),
        ({"efa": 16}, {}, "gives 16 and the nodes have 24; raise its quota"),
        ({"efa": 24}, {EFA: "8"}, "gangs of several nodes ask for"),
        ({"efa": None}, {EFA: "8"}, "gangs of several nodes ask for"),
    ],
)
def test_gang_in_a_queue_asks_for_what_its_cluster_queue_covers(
    network: Mapping[str, int | None], amounts: dict[str, str], words: str
) -> None:
    world = queued(**network)
    world.run(until=lambda: running(world, "links"))
    assert list(asked(world, "links").values()) == [amounts] * 3
    assert words in world.condition("NodesDiscovered").message


def test_quota_of_network_devices_is_read_from_all_groups_of_the_cluster_queue() -> None:
    def group(name: str, *quotas: dict[str, Any]) -> dict[str, Any]:
        flavors = [{"name": f"f{n}", "resources": [{"name": name, **quota}]} for n, quota in enumerate(quotas)]
        return {"coveredResources": [name], "flavors": flavors}

    groups = [group(RESOURCE, {"nominalQuota": 8}), group(EFA, {"nominalQuota": 16}, {"nominalQuota": "16"})]
    flavors = [{"metadata": {"name": name}} for name in ("f0", "f1")]
    queue = {"metadata": {"name": "team"}, "spec": {"resourceGroups": groups}}

    def read(**spec: str) -> QueueFacts:
        return queue_facts("research", {**queue, "spec": queue["spec"] | spec}, flavors, [], RESOURCE)

    assert read().network_quota == {EFA: 32}
    assert read(cohortName="all").network_quota == {EFA: None}


class BusyWorld(World):
    """World in which pods of others hold cards."""

    held: Mapping[str, Mapping[str, int]] = {}

    def snapshot(self) -> Snapshot:
        return replace(super().snapshot(), used_network=self.held)


def test_gang_waits_for_cards_that_other_pods_hold_and_names_them() -> None:
    world = BusyWorld(nodes=efa_nodes())
    world.held = {"n2": {EFA: 6}}
    for _ in range(60):
        world.step(60.0)
    told = world.condition("LinksMeasured")
    assert (told.reason, told.status) == ("WaitingForCapacity", "Unknown")
    assert f"node n2 has 2 of 8 needed {EFA} free" in told.message
    world.held = {}
    world.run()
    assert world.succeeded == "True"


def test_pod_that_the_scheduler_cannot_place_names_the_resource() -> None:
    world = World(nodes=efa_nodes(), spec=spec_of(worker=template(efa="2")))
    world.run(until=lambda: any(not pod.gates for pod in world.pods.values()))
    words = f"0/3 nodes are available: 1 Insufficient {EFA}."
    told = []
    while len(told) < 60 and not any("PlacementNotSchedulable" in reason for reason, _ in told):
        world.pods = {name: replace(pod, phase="Pending", node="", containers=(), message=words, started_at=None)
                      for name, pod in world.pods.items()}  # fmt: skip
        world.apply(world.decide())
        world.now += timedelta(seconds=10)
        told.append((world.condition("LinksMeasured").reason, world.condition("LinksMeasured").message))
    assert told[-1][0] == "PlacementNotSchedulable"
    assert f"Insufficient {EFA}" in told[-1][1]


def test_used_cards_are_counted_by_node_and_resource() -> None:
    def pod(node_name: str, phase: str, *containers: dict[str, str]) -> dict[str, Any]:
        resources = [{"resources": {"limits": one}} for one in containers]
        return {"metadata": {}, "spec": {"nodeName": node_name, "containers": resources}, "status": {"phase": phase}}

    pods = [
        pod("a", "Running", {EFA: "4"}, {EFA: "1", IB: "1"}),
        pod("a", "Succeeded", {EFA: "4"}),
        pod("b", "Pending", {RESOURCE: "8"}),
        pod("", "Pending", {EFA: "4"}),
    ]
    requests = object_facts.device_requests(pods, RESOURCE)
    assert used_network(requests) == {"a": {EFA: 5, IB: 1}}


def test_plan_under_way_goes_on_without_network_devices() -> None:
    """A discovery and a task of a former version know of none."""
    world = World(nodes=efa_nodes())
    while not (names := [name for name in world.stored if name.endswith("-discovery")]):
        world.step()
    (name,) = names
    document = json.loads(world.stored[name].data["document.json"])
    del document["network"]
    world.stored[name] = replace(world.stored[name], data={"document.json": json.dumps(document)})
    world.run(until=lambda: running(world, "links"))
    assert list(asked(world, "links").values()) == [{}] * 3
    world.run()
    assert world.succeeded == "True"


def test_nodes_without_cards_store_what_they_did_before() -> None:
    world = until_running("links")
    found = next(one.data["document.json"] for name, one in world.stored.items() if name.endswith("-discovery"))
    assert "network" not in json.loads(found)
    assert not any("network.json" in stored.data for stored in world.stored.values())


@pytest.mark.parametrize("kind", LauncherKind)
def test_job_that_is_handed_over_asks_as_its_trial_did(kind: LauncherKind) -> None:
    job = {"image": "registry.example/train:1", "command": ["torchrun", "train.py"]}
    nodes = tuple(with_cards(node(name, devices=1), efa=4) for name in ("n1", "n2", "n3", "n4"))
    world = World(nodes=nodes, spec=spec_of(launcher=kind, apply="Suspended", job=job, trials={"topK": 1}))
    trials: dict[str, list[dict[str, str]]] = {}

    def look() -> bool:
        for gang in {pod.gang for pod in world.pods.values()}:
            trials[gang] = list(asked(world, gang).values())
        return bool(world.succeeded == "True")

    world.run(until=look)
    pods = [pod for manifest in world.handed_over.values() for pod in _pods(manifest)]
    found = [pod["spec"]["containers"][0]["resources"]["limits"] for pod in pods]
    assert len(found) > 1
    assert all(one[EFA] == "4" for one in found)
    assert trials[world.status.winner.trial] == [{EFA: "4"}] * len(found)


def _pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    if manifest["kind"] == LauncherKind.PYTORCH_JOB:
        return [one["template"] for one in manifest["spec"]["pytorchReplicaSpecs"].values()]
    return [one["template"]["spec"]["template"] for one in manifest["spec"]["replicatedJobs"]]
