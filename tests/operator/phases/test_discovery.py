"""Devices discovered on nodes, by source, and reasons for which a node is left out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from flow_world import EMULATION, World, node, spec_of

from trainwright_operator.flow.phases.discovery import find_late_nodes, inspect_nodes
from trainwright_operator.flow.snapshot import NodeFacts, SliceDevice, Taint

GPU = {"nvidia.com/gpu": "4"}
ON_GKE = {"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"}


def bare(name: str = "n", **labels: str) -> NodeFacts:
    return NodeFacts(name, {key.replace("__", "/"): value for key, value in labels.items()}, {}, GPU)


def labelled(**labels: str) -> NodeFacts:
    own = {"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.memory": "15360"}
    return NodeFacts("n", own | labels, {}, GPU)


def look(*nodes: NodeFacts, slices: tuple[SliceDevice, ...] = (), pod_spec: Any = None, **devices: object):
    snapshot = replace(World().snapshot(), nodes=nodes, slice_devices=slices)
    return inspect_nodes(snapshot, spec_of(devices=devices, worker={"podTemplate": {"spec": pod_spec or {}}}))


def test_discovery_labels_give_type_and_memory_and_allocatable_gives_count() -> None:
    found = look(labelled())
    assert [(n.name, n.accelerator, n.devices) for n in found.nodes] == [("n", "Tesla-T4", 4)]
    assert found.accelerators[0].memory_bytes == 15360 * 2**20


def test_resource_slices_take_precedence_over_labels() -> None:
    slices = tuple(SliceDevice("n", "NVIDIA H200", 141 * 2**30) for _ in range(4))
    found = look(labelled(), slices=slices)
    assert found.accelerators[0].name == "NVIDIA-H200"
    assert found.accelerators[0].memory_bytes == 141 * 2**30


def test_shared_devices_are_not_used_where_resource_slices_give_their_type() -> None:
    slices = (SliceDevice("n", "Tesla T4", 15 * 2**30),)
    for labels in ({"nvidia.com/gpu.replicas": "4"}, {"nvidia.com/gpu.product": "Tesla-T4-SHARED"}):
        found = look(labelled(**labels), slices=slices)
        assert found.nodes == ()
        assert "time-sliced" in found.excluded[0].reason


def by_karpenter(name: str, mebibytes: int) -> dict[str, str]:
    return {"karpenter.k8s.aws/instance-gpu-name": name, "karpenter.k8s.aws/instance-gpu-memory": str(mebibytes)}


@pytest.mark.parametrize(
    ("labels", "accelerator", "gibibytes"),
    [
        ({"cloud.google.com/gke-accelerator": "nvidia-tesla-v100"}, "Tesla-V100-SXM2-16GB", 15.75),
        (by_karpenter("t4", 16384), "Tesla-T4", 14.56),
        (by_karpenter("v100", 32768), "Tesla-V100-SXM2-32GB", 31.73),
        (by_karpenter("a100", 81920), "NVIDIA-A100-SXM4-80GB", 79.14),
        (by_karpenter("unheard-of", 16384), "unheard-of", 16),
        ({"node.kubernetes.io/instance-type": "p3.8xlarge"}, "Tesla-V100-SXM2-16GB", 15.75),
        ({"node.kubernetes.io/instance-type": "Standard_NC4as_T4_v3"}, "Tesla-T4", 14.56),
    ],
)
def test_cloud_labels_are_used_last_with_the_reported_memory(
    labels: dict[str, str], accelerator: str, gibibytes: float
) -> None:
    found = look(NodeFacts("n", labels, {}, GPU))
    assert [a.name for a in found.accelerators] == [accelerator]
    assert found.accelerators[0].memory_bytes == pytest.approx(gibibytes * 2**30, rel=1e-3)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(labelled(), allocatable={}), "has no nvidia.com/gpu"),
        (replace(labelled(), ready=False), "not ready"),
        (replace(labelled(), schedulable=False), "cordoned"),
        (labelled(**{"nvidia.com/gpu.product": "Tesla-T4-SHARED"}), "time-sliced"),
        (labelled(**{"nvidia.com/gpu.replicas": "4"}), "time-sliced"),
        (
            bare(**(ON_GKE | {"cloud.google.com/gke-gpu-sharing-strategy": "time-sharing"})),
            "time-sliced or shared by MPS",
        ),
        (bare(**(ON_GKE | {"cloud.google.com/gke-gpu-sharing-strategy": "mps"})), "time-sliced or shared by MPS"),
        (bare(**(ON_GKE | {"nvidia.com/gpu.replicas": "8"})), "time-sliced"),
        (labelled(**{"nvidia.com/gpu.product": "NVIDIA-A100-MIG-1g.5gb"}), "MIG"),
        (
            replace(labelled(), allocatable={"nvidia.com/mig-1g.5gb": "7"}),
            "nvidia.com/gpu; nvidia.com/mig-1g.5gb are MIG",
        ),
        (
            NodeFacts(
                "n",
                {
                    "cloud.google.com/gke-accelerator": "nvidia-tesla-a100",
                    "cloud.google.com/gke-gpu-partition-size": "1g.5gb",
                },
                {},
                GPU,
            ),
            "MIG instances",
        ),
        (labelled(**{"nvidia.com/gpu.memory": "lots"}), "nvidia.com/gpu.memory"),
        (bare(), "unknown device type"),
        (bare(**{"node.kubernetes.io__instance-type": "m5.large"}), "unknown device type"),
        (replace(node("n"), annotations={}), "cannot read the device table"),
        (replace(node("n"), annotations={"trainwright.dev/emulation": '{"flops_per_second": -1}'}), "device table"),
    ],
)
def test_unusable_node_is_listed_with_the_reason(facts: NodeFacts, words: str) -> None:
    found = look(facts)
    assert found.nodes == ()
    assert words in found.excluded[0].reason


def test_only_whole_devices_of_a_node_with_mig_instances_are_used() -> None:
    instances = {"nvidia.com/mig-1g.5gb": "7", **GPU}
    mixed = replace(labelled(**{"nvidia.com/mig.strategy": "mixed"}), allocatable=instances)
    assert [node.devices for node in look(mixed).nodes] == [4]
    found = look(mixed, resourceName="nvidia.com/mig-1g.5gb")
    assert found.nodes == ()
    assert "MIG instances, which plans cannot use" in found.excluded[0].reason
    split = replace(mixed, allocatable={"nvidia.com/mig-1g.5gb": "7"})
    snapshot = replace(World().snapshot(), nodes=(split,))
    assert find_late_nodes(snapshot, spec_of(), unready_since=World().now) == []


def test_status_lists_at_most_as_many_nodes_as_the_schema_allows() -> None:
    usable = [replace(labelled(), name=f"n{number}") for number in range(1100)]
    unfit = [bare(f"u{number}") for number in range(1100)]
    status = look(*usable, *unfit).status()
    assert (len(status.nodes), len(status.excluded_nodes), status.devices) == (1024, 256, 4400)


TAINT = Taint("team/vision", "present", "NoSchedule")


@pytest.mark.parametrize(
    ("taint", "toleration", "used"),
    [
        (TAINT, None, False),
        (replace(TAINT, effect="NoExecute"), None, False),
        (replace(TAINT, effect="PreferNoSchedule"), None, True),
        (TAINT, {"operator": "Exists"}, True),
        (TAINT, {"key": "team/vision", "operator": "Exists"}, True),
        (TAINT, {"key": "team/vision", "operator": "Exists", "effect": "NoExecute"}, False),
        (TAINT, {"key": "team/vision", "value": "present", "effect": "NoSchedule"}, True),
        (TAINT, {"key": "team/vision", "operator": "Equal", "value": "absent"}, False),
        (replace(TAINT, value=""), {"key": "team/vision"}, True),
        (TAINT, {"key": "other", "operator": "Exists"}, False),
        (TAINT, {"operator": "Equal", "value": "present"}, False),
        (Taint("nvidia.com/gpu", "present", "NoSchedule"), None, True),
        (Taint("node.kubernetes.io/not-ready", "", "NoSchedule"), None, True),
        (Taint("node.kubernetes.io/unschedulable", "", "NoSchedule"), None, True),
    ],
)
def test_node_is_excluded_when_its_taint_is_not_tolerated(taint: Taint, toleration: Any, used: bool) -> None:
    pod_spec = {"tolerations": [toleration]} if toleration else {}
    found = look(replace(labelled(), taints=(taint,)), pod_spec=pod_spec)
    assert bool(found.nodes) == used
    if not used:
        assert "taint team/vision" in found.excluded[0].reason
        assert "worker.podTemplate.spec.tolerations" in found.excluded[0].reason


def test_tolerations_of_the_plans_pod_template_count() -> None:
    tainted = tuple(replace(one, taints=(TAINT,)) for one in World().nodes)
    world = World(nodes=tainted)
    world.run(until=lambda: world.status.waiting is not None)
    assert world.condition("NodesDiscovered").reason == "NoUsableNodes"
    tolerations = [{"key": "team/vision", "operator": "Exists"}]
    spec = spec_of(trials={"topK": 0}, worker={"podTemplate": {"spec": {"tolerations": tolerations}}})
    world = World(nodes=tainted, spec=spec)
    world.run()
    assert world.succeeded == "True"


def test_only_the_node_of_an_unreadable_slice_is_excluded() -> None:
    broken = SliceDevice("a", "NVIDIA H200", 0, "its ResourceSlice has an invalid device memory: 'lots'")
    found = look(replace(labelled(), name="a"), replace(labelled(), name="b"), slices=(broken,))
    assert [n.name for n in found.nodes] == ["b"]
    assert "memory: 'lots'" in found.excluded[0].reason


def test_products_selector_and_maximum_exclude_nodes() -> None:
    t4, other = labelled(), replace(labelled(**{"nvidia.com/gpu.product": "NVIDIA-L4"}), name="other")
    found = look(t4, other, products=["NVIDIA-L4"])
    assert [n.name for n in found.nodes] == ["other"]
    assert "devices.products" in found.excluded[0].reason
    found = look(t4, other, nodeSelector={"pool": "training"})
    assert found.nodes == ()
    assert all("pool=training" in excluded.reason for excluded in found.excluded)
    found = look(t4, other, max=6)
    assert [n.name for n in found.nodes] == ["n"]
    assert "devices.max 6" in found.excluded[0].reason


def test_one_type_with_two_device_tables_is_refused() -> None:
    other = replace(node("m"), annotations={"trainwright.dev/emulation": EMULATION.replace("1e9", "2e9")})
    found = look(node("n"), replace(other, name="z"))
    assert [n.name for n in found.nodes] == ["n"]
    assert "differ" in found.excluded[0].reason


def test_plan_names_what_lacks_when_all_types_are_unknown() -> None:
    world = World(nodes=(bare(),))
    world.run(until=lambda: world.status.waiting is not None)
    assert world.condition("NodesDiscovered").reason == "UnknownAccelerator"
    assert "gpu feature discovery" in world.condition("Succeeded").message.lower()
    assert world.status.cluster.excluded_nodes[0].name == "n"


def test_discovery_stays_when_nodes_change() -> None:
    world = World(spec=spec_of(trials={"topK": 0}))
    world.run(until=lambda: world.condition("NodesDiscovered") is not None and bool(world.jobs))
    world.nodes = (*world.nodes, node("n9"))
    status = world.run()
    assert [n.name for n in status.cluster.nodes] == ["n1", "n2", "n3"]


def test_the_shown_list_of_excluded_nodes_is_bounded_and_names_those_with_devices_first() -> None:
    many = tuple(replace(node(f"a{number:03}"), allocatable={}) for number in range(300))
    found = look(*many, replace(node("z"), schedulable=False))
    assert len(found.excluded) == 256
    assert found.excluded[0].name == "z"


def test_emulated_devices_are_limited_to_the_memory_of_their_node() -> None:
    (found,) = look(node("n")).accelerators
    assert found.emulation is not None
    assert found.emulation.memory_bytes == found.memory_bytes == 16384 * 2**20


def test_devices_max_takes_nodes_without_devices_in_use_first() -> None:
    world = World(spec=spec_of(devices={"max": 4}), others={"n1": 1, "n3": 2})
    world.nodes = tuple(node(f"n{number}") for number in range(1, 5))
    world.run(until=lambda: world.condition("NodesDiscovered").status == "True")
    assert [one.name for one in world.status.cluster.nodes] == ["n2", "n4"]


def test_cluster_with_more_devices_than_a_plan_may_use_is_refused_at_once() -> None:
    world = World()
    world.nodes = tuple(node(f"n{number:04}", devices=8) for number in range(513))
    world.run()
    found = world.condition("NodesDiscovered")
    assert (found.status, found.reason) == ("False", "SpecInvalid")
    assert "4104 usable devices" in found.message
    assert "devices.max" in found.message
    assert world.jobs == {}


def test_stored_discovery_without_the_types_of_its_nodes_is_invalid() -> None:
    world = World()
    world.run(until=lambda: world.status.cluster is not None and len(world.stored) > 1)
    name = next(name for name in world.stored if name.endswith("-discovery"))
    document = json.loads(world.stored[name].data["document.json"]) | {"accelerators": []}
    world.stored[name] = replace(world.stored[name], data={"document.json": json.dumps(document)})
    world.run()
    assert world.condition("NodesDiscovered").reason == "StoredDocumentInvalid"
    assert f"ConfigMap {name}: accelerators: expected those of the nodes" in world.condition("NodesDiscovered").message


@pytest.mark.parametrize(
    ("part", "field", "value", "words"),
    [
        ("accelerators", "memory_bytes", -5, "accelerators.0: accelerator Tesla-T4 needs memory_bytes above 0, got -5"),
        ("nodes", "devices", -1, "nodes.0"),
        ("accelerators", "name", "x" * 200, "accelerator: String should have at most 128 characters, got 'xxx"),
    ],
)
def test_unusable_stored_value_is_told_with_its_place_and_what_to_do(
    part: str, field: str, value: object, words: str
) -> None:
    world = World(nodes=(node("n1", "Tesla-T4"),))
    world.run(until=lambda: world.status.cluster is not None and len(world.stored) > 1)
    name = next(name for name in world.stored if name.endswith("-discovery"))
    document = json.loads(world.stored[name].data["document.json"])
    document[part][0][field] = value
    if field == "name":
        document["nodes"][0]["accelerator"] = value
    world.stored[name] = replace(world.stored[name], data={"document.json": json.dumps(document)})
    world.run()
    found = world.condition("NodesDiscovered")
    assert found.reason == "StoredDocumentInvalid"
    assert f"ConfigMap {name}: " in found.message
    assert words in found.message
    assert "worker" not in found.message
    assert "delete that ConfigMap, then edit the spec" in found.message
    del world.stored[name]
    world.change(trials={"topK": 1})
    world.run()
    assert world.succeeded == "True"
