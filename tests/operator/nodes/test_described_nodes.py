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
