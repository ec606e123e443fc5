"""Anything that nodes may say of themselves: discovery stores only what it can read again."""

from __future__ import annotations

from dataclasses import replace

from flow_world import RESOURCE, World, node, spec_of
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright import documents
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.phases.discovery import find_late_nodes, find_lost_nodes, inspect_nodes
from trainwright_operator.flow.snapshot import NodeFacts, SliceDevice

ZONE = "topology.kubernetes.io/zone"
ODD = st.one_of(
    st.text(max_size=80),
    st.integers().map(str),
    st.sampled_from(["", "1", "4", "16384", "1e99", "9" * 5000, "1Gi", "١٢", "-1", "x" * 300, "NaN"]),
)
PRODUCTS = st.one_of(ODD, st.sampled_from(["Tesla-T4", "emulated-t4", "A100-PCIE-40GB", "NVIDIA-A100-4C", "T4-SHARED"]))
LABELS = st.fixed_dictionaries(
    {},
    optional={
        "nvidia.com/gpu.product": PRODUCTS,
        **dict.fromkeys(
            (
                "nvidia.com/gpu.memory",
                "nvidia.com/gpu.count",
                "nvidia.com/gpu.replicas",
                "nvidia.com/gpu.clique",
                "nvidia.com/mig.strategy",
                "nvidia.com/vgpu.present",
                "nvidia.com/cuda.driver-version.full",
                "amd.com/gpu.product-name",
                "amd.com/gpu.vram",
                "amd.com/compute-memory-partition",
                "cloud.google.com/gke-accelerator",
                "karpenter.k8s.aws/instance-gpu-name",
                "karpenter.k8s.aws/instance-gpu-memory",
                "node.kubernetes.io/instance-type",
                ZONE,
            ),
            ODD,
        ),
    },
)
AMOUNTS = st.dictionaries(st.sampled_from([RESOURCE, "nvidia.com/mig-1g.5gb", "nvidia.com/gpu.shared"]), ODD)
TABLES = st.dictionaries(
    st.sampled_from(["flops_per_second", "floor_seconds", "updated_parameters_per_second", "memory_bytes", "other"]),
    st.one_of(st.floats(), st.integers(), st.none(), st.text(max_size=3)),
).map(str)
NODES = st.builds(
    NodeFacts,
    name=st.sampled_from(["a", "b"]),
    labels=LABELS,
    annotations=st.fixed_dictionaries({}, optional={"trainwright.dev/emulation": st.one_of(ODD, TABLES)}),
    allocatable=AMOUNTS | st.just({RESOURCE: "4"}),
    capacity=AMOUNTS,
)
SLICES = st.builds(
    SliceDevice, node=st.sampled_from(["a", "b"]), product=PRODUCTS, memory_bytes=st.integers(), driver=ODD
)


@examples(2000, 200)
@given(st.lists(NODES, max_size=2, unique_by=lambda facts: facts.name), st.lists(SLICES, max_size=2))
def test_whatever_nodes_say_the_others_are_discovered_and_can_be_read_again(
    odd: list[NodeFacts], slices: list[SliceDevice]
) -> None:
    spec = spec_of(links={"topologyLabels": [ZONE]})
    world = World()
    snapshot = replace(world.snapshot(), nodes=(*odd, node("good")), slice_devices=tuple(slices))
    found = inspect_nodes(snapshot, spec)
    assert "good" in {one.name for one in found.nodes} | {one.name for one in found.excluded if "differ" in one.reason}
    assert {one.name for one in found.nodes} | {one.name for one in found.excluded} == {
        one.name for one in snapshot.nodes
    }
    assert documents.loads(documents.dumps(found), DiscoveredDevices) == found
    assert find_lost_nodes(snapshot, spec, found) == {}
    find_late_nodes(snapshot, spec, unready_since=world.now)
    assert found.status().dump()["excludedNodes"] == [
        {"name": one.name, "code": one.code, "reason": one.reason} for one in found.excluded
    ]
    assert all(one.reason.isprintable() for one in found.excluded)
