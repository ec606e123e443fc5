"""Nodes of `kubectl get nodes --output json` as a cluster document, by discovery's own rules."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from trainwright_operator.described_nodes import describe_list

READY = [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
T4 = {"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.memory": "15360"}


def node(name: str, labels: dict[str, str], allocatable: dict[str, str], **spec: Any) -> dict[str, Any]:
    status = {"allocatable": allocatable, "capacity": allocatable, "conditions": READY}
    return {"kind": "Node", "metadata": {"name": name, "labels": labels}, "spec": spec, "status": status}


def listed(*items: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}


def test_nodes_with_devices_are_described_and_others_are_named_with_the_reason() -> None:
    nodes, left_out = describe_list(
        listed(
            node("t4", {**T4, "node.kubernetes.io/instance-type": "g4dn.12xlarge"}, {"nvidia.com/gpu": "4"}),
            node("amd", {"amd.com/gpu.product-name": "MI300X", "amd.com/gpu.vram": "192G"}, {"amd.com/gpu": "8"}),
            node("control-plane", {}, {"cpu": "8"}),
            node("cordoned", T4, {"nvidia.com/gpu": "4"}, unschedulable=True),
            node("slices", {**T4, "nvidia.com/gpu.replicas": "4"}, {"nvidia.com/gpu": "16"}),
            node("strange", {}, {"nvidia.com/gpu": "2"}),
        )
    )
    assert [(each.name, each.accelerator, each.devices, each.machine_type) for each in nodes] == [
        ("amd", "AMD-Instinct-MI300X-OAM", 8, ""),
        ("t4", "Tesla-T4", 4, "g4dn.12xlarge"),
    ]
    assert nodes[1].reported is not None
    assert nodes[1].reported.memory_bytes == 15360 * 2**20
    reasons = {sentence.split(" is left out: ")[0]: sentence for sentence in left_out}
    assert set(reasons) == {"cordoned", "slices", "strange"}
    assert "uncordon it" in reasons["cordoned"]
    assert "time-sliced" in reasons["slices"]
    assert "unknown device type" in reasons["strange"]


def test_a_taint_of_the_devices_leaves_no_node_out() -> None:
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    (only,), _ = describe_list(node("t4", T4, {"nvidia.com/gpu": "4"}, taints=[taint]))
    assert only.devices == 4


def device_slice(node_name: str, product: str, count: int, kind: str = "gpu", **spec: Any) -> dict[str, Any]:
    attributes = {"productName": {"string": product}, "type": {"string": kind}}
    devices = [
        {"name": f"{kind}-{number}", "attributes": attributes, "capacity": {"memory": {"value": "143771Mi"}}}
        for number in range(count)
    ]
    pool = {"name": node_name, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.nvidia.com", "nodeName": node_name, "pool": pool, "devices": devices, **spec}
    head = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}
    return {**head, "metadata": {"name": f"{node_name}-{kind}"}, "spec": spec}


def device_class(*conditions: str) -> dict[str, Any]:
    expression = " && ".join(("device.driver == 'gpu.nvidia.com'", *conditions))
    spec = {"extendedResourceName": "nvidia.com/gpu", "selectors": [{"cel": {"expression": expression}}]}
    return {"kind": "DeviceClass", "metadata": {"name": "gpu.nvidia.com"}, "spec": spec}


def test_devices_that_drivers_publish_are_described_by_the_operators_rules() -> None:
    whole = device_class("device.attributes['gpu.nvidia.com'].type == 'gpu'")
    cut = device_slice("h200", "NVIDIA H200", 1, "mig")
    machine = node("h200", {"node.kubernetes.io/instance-type": "p5en.48xlarge"}, {"cpu": "8"})
    published = device_slice("h200", "NVIDIA H200", 8)
    (only,), remarks = describe_list(listed(machine, published, cut, whole))
    assert (only.accelerator, only.devices, only.machine_type) == ("NVIDIA-H200", 8, "p5en.48xlarge")
    assert only.reported is not None
    assert only.reported.memory_bytes == 143771 * 2**20
    assert remarks == ()
    with pytest.raises(ValueError, match="selects its whole devices and those of type mig alike"):
        describe_list(listed(machine, published, cut, device_class()))


def test_slices_alone_are_nodes_with_the_classes_that_drivers_install() -> None:
    nodes, remarks = describe_list(
        listed(device_slice("b", "NVIDIA H200", 8), device_slice("a", "NVIDIA H200", 4), device_slice("nic", "", 0))
    )
    assert [(each.name, each.devices) for each in nodes] == [("a", 4), ("b", 8)]
    assert [sentence.partition(" is among")[0] for sentence in remarks] == ["no DeviceClass with an extended resource"]


def test_slices_of_a_former_version_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be of resource.k8s.io/v1, got resource.k8s.io/v1beta1"):
        describe_list(device_slice("a", "NVIDIA H200", 1) | {"apiVersion": "resource.k8s.io/v1beta1"})


def test_no_device_is_refused_with_the_reasons() -> None:
    with pytest.raises(ValueError, match="no node has devices that a plan can use: strange: unknown device type"):
        describe_list(listed(node("strange", {}, {"nvidia.com/gpu": "2"})))
    with pytest.raises(ValueError, match="no node has devices"):
        describe_list(listed())


@pytest.mark.parametrize("wrong", [[], {"items": 3}, {"items": [{"kind": "Pod"}]}, {"document": "Cluster"}, None, "x"])
def test_other_documents_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="give what `kubectl get nodes --output json` prints"):
        describe_list(wrong)


def test_reading_nodes_needs_neither_a_client_of_kubernetes_nor_kopf() -> None:
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('kubernetes', 'kopf', 'torch', 'prometheus_client')))\n"
        "import trainwright_operator.described_nodes, trainwright_operator.local.described_machine\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
