"""Conversion of the API server's objects and the environment into facts."""

from __future__ import annotations

import pytest

from trainwright_operator import device_resource, plan_resource
from trainwright_operator.api.installation import (
    Handover,
    HandoverRule,
    InstallationRules,
    PodTemplateRule,
    TenantLimits,
)
from trainwright_operator.api.quantities import parse_quantity, whole_number
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS
from trainwright_operator.flow.nodes.published_devices import PublishedDevices, used_devices
from trainwright_operator.flow.snapshot import PodFacts, SliceDevice
from trainwright_operator.kube import object_facts
from trainwright_operator.node_resource import node_facts
from trainwright_operator.settings import Settings


def pod(
    name: str, *, node: str = "", pinned: str = "", devices: str = "1", phase: str = "Running", gated: bool = False
):
    spec: dict = {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": devices}}}]}
    if node:
        spec["nodeName"] = node
    if pinned:
        match = {"key": "metadata.name", "operator": "In", "values": [pinned]}
        terms = {"nodeSelectorTerms": [{"matchFields": [match]}]}
        spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    if gated:
        spec["schedulingGates"] = [{"name": "g"}]
    meta = {"name": name, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": meta, "spec": spec, "status": {"phase": phase}}


def slice_devices(resource_slice: dict) -> tuple[SliceDevice, ...]:
    return PublishedDevices.of([device_resource.pool_part(resource_slice, {})], {}).slice_devices()


def test_bound_and_pinned_pods_hold_devices_until_they_end() -> None:
    pods = [
        pod("bound", node="a", devices="2"),
        pod("pinned", pinned="a"),
        pod("ended", node="a", phase="Succeeded"),
        pod("failed", node="a", phase="Failed"),
        pod("gated", pinned="b", gated=True),
        pod("unplaced"),
    ]
    assert used_devices(object_facts.device_requests(pods, "nvidia.com/gpu")) == {"a": 3}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("16Gi", 16 * 2**30),
        ("2k", 2000),
        ("81559Mi", 81559 * 2**20),
        ("2P", 2 * 10**15),
        ("1E", 10**18),
        ("1Ei", 2**60),
        ("128974848000m", 128974848),
        ("12e6", 12 * 10**6),
        ("1.5Gi", 3 * 2**29),
    ],
)
def test_quantities_are_parsed_as_bytes(text: str, value: int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    ("text", "number"),
    [("8", 8), ("1k", 1000), ("8000m", 8), ("500m", 0), ("-4", 0), ("٤", 0), ("some", 0), ("9" * 99, 0)],
)
def test_things_that_cannot_be_divided_are_counted_in_whole_numbers(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "lots", "1Qi", "Gi", "1e999"])
def test_invalid_quantity_is_reported_as_the_problem_of_a_slice(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)
    device = {
        "attributes": {"productName": {"string": "NVIDIA H200"}},
        "capacity": {"memory": {"value": text or "?"}},
    }
    (found,) = slice_devices({"spec": {"nodeName": "n", "devices": [device]}})
    assert "is not a quantity" in found.problem
    assert not list(object_facts.device_requests([pod("odd", node="a", devices=text or "?")], "nvidia.com/gpu"))


def test_a_nodes_taints_are_read() -> None:
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    found = node_facts({"metadata": {"name": "n"}, "spec": {"taints": [taint]}})
    assert [(one.key, one.value, one.effect) for one in found.taints] == [("nvidia.com/gpu", "", "NoSchedule")]


def test_pods_are_read_with_the_workers_container_first() -> None:
    raw = pod("p-worker-3", node="a")
    raw["metadata"]["labels"] = {
        "training.kubeflow.org/replica-index": "3", "training.kubeflow.org/replica-type": "worker",
        "training.kubeflow.org/job-name": "p", "trainwright.dev/gang": "links",
    }  # fmt: skip
    raw["status"] |= {
        "initContainerStatuses": [{"name": "init-pytorch", "state": {"waiting": {"reason": "ErrImagePull"}}}],
        "containerStatuses": [
            {"name": "sidecar", "state": {}},
            {"name": "pytorch", "state": {"terminated": {"exitCode": 13, "message": "why", "reason": "Error"}}},
        ],
    }
    found = object_facts.pod_facts(raw)
    assert (found.job, found.role, found.index, found.gang) == ("p", "worker", 3, "links")
    assert [container.name for container in found.containers] == ["pytorch", "sidecar", "init-pytorch"]
    assert (found.containers[0].exit_code, found.containers[0].termination_message) == (13, "why")
    assert found.containers[2].waiting_reason == "ErrImagePull"


def test_first_pod_of_a_jobsets_first_job_reports() -> None:
    """The other pods of that job have the same labels but for their index."""

    def read(index: str) -> PodFacts:
        raw = pod(f"p-s0-0-{index}-x7k2p", node="a")
        raw["metadata"]["labels"] = {
            "jobset.sigs.k8s.io/jobset-name": "p", "jobset.sigs.k8s.io/replicatedjob-name": "s0",
            "batch.kubernetes.io/job-completion-index": index, "trainwright.dev/rendezvous": "true",
        }  # fmt: skip
        return object_facts.pod_facts(raw)

    assert [(one.job, one.role, one.index, one.reports) for one in map(read, "01")] == [
        ("p", "s0", 0, True),
        ("p", "s0", 1, False),
    ]


@pytest.mark.parametrize(("kind", "condition"), [("PyTorchJob", "Succeeded"), ("JobSet", "Completed")])
def test_job_has_succeeded_by_its_launchers_condition(kind: str, condition: str) -> None:
    raw = {
        "metadata": {"name": "p", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "status": {"conditions": [{"type": condition, "status": "True"}]},
    }
    found = [object_facts.job_facts(raw, launcher) for launcher in LAUNCHERS.values()]
    assert [one.launcher for one in found if one.succeeded] == [kind]


def test_pod_lists_missing_config_maps_until_it_runs() -> None:
    raw = pod("p", node="a")
    raw["spec"]["volumes"] = [
        {"name": "shared-memory", "emptyDir": {}},
        {"name": "order", "configMap": {"name": "p-order"}},
        {"name": "model", "configMap": {"name": "encoder", "optional": False}},
        {"name": "notes", "configMap": {"name": "notes", "optional": True}},
    ]
    raw["status"]["phase"] = "Pending"
    assert object_facts.pod_facts(raw).required_maps == ("p-order", "encoder")
    assert object_facts.pod_facts(raw | {"status": {"phase": "Running"}}).required_maps == ()
    del raw["spec"]["nodeName"]
    assert object_facts.pod_facts(raw).required_maps == ()


def test_resource_slices_yield_devices_with_product_and_memory() -> None:
    device = {
        "name": "gpu-0",
        "attributes": {"productName": {"string": "NVIDIA H200"}, "driverVersion": {"version": "550.54.15"}},
        "capacity": {"memory": {"value": "141Gi"}},
    }
    raw = {"spec": {"nodeName": "n", "driver": "gpu.nvidia.com", "devices": [device, {"name": "nic-0"}]}}
    (found,) = slice_devices(raw)
    assert (found.product, found.memory_bytes, found.problem) == ("NVIDIA H200", 141 * 2**30, "")
    assert found.driver == "550.54.15"
    device["attributes"] |= {"type": {"string": "mig"}, "profile": {"string": "1g.18gb"}}
    assert "MIG instances" in slice_devices(raw)[0].problem


def test_spec_of_another_version_becomes_an_error_message() -> None:
    resource = {
        "metadata": {"name": "p", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"model": {"gpt": {"layers": 1}}, "training": {"globalBatchSize": 8}},
    }
    found = plan_resource.plan_facts(resource, "image")
    assert found.spec is None
    assert found.spec_error.startswith("spec.model.gpt.hiddenSize: ")


def test_settings_are_read_from_the_environment_and_a_wrong_port_is_rejected() -> None:
    read = Settings.from_environment({"TRAINWRIGHT_WATCH_NAMESPACES": "a, b,,a", "TRAINWRIGHT_METRICS_PORT": "19090"})
    assert read.namespaces == ("a", "b")
    assert read.metrics_port == 19090
    assert Settings.from_environment({}).namespaces == ()
    with pytest.raises(ValueError, match="TRAINWRIGHT_HEALTH_PORT must be a port number"):
        Settings.from_environment({"TRAINWRIGHT_HEALTH_PORT": "http"})
    assert (read.log_level, read.lease_name) == ("INFO", "trainwright-operator")
    named = Settings.from_environment({"TRAINWRIGHT_LOG_LEVEL": "warning", "TRAINWRIGHT_LEASE_NAME": "blue"})
    assert (named.log_level, named.lease_name) == ("WARNING", "blue")
    with pytest.raises(
        ValueError, match="TRAINWRIGHT_LOG_LEVEL must be one of debug, info, warning, error, got 'loud'"
    ):
        Settings.from_environment({"TRAINWRIGHT_LOG_LEVEL": "loud"})


def test_settings_about_tenants_are_strict_by_default() -> None:
    usual = Settings.from_environment({})
    assert usual.rules == InstallationRules(isolates_gangs=True, pod_template=PodTemplateRule.RESTRICTED)
    variables = {"TRAINWRIGHT_NETWORK_POLICY": "false", "TRAINWRIGHT_ALLOW_POD_TEMPLATE": "Any"}
    named = Settings.from_environment({"TRAINWRIGHT_WORKER_PRIORITY_CLASS": "batch-low"})
    assert named.rules == InstallationRules(priority_class="batch-low")
    chosen = Settings.from_environment(variables)
    assert chosen.rules == InstallationRules(isolates_gangs=False, pod_template=PodTemplateRule.ANY)
    with pytest.raises(ValueError, match="ALLOW_POD_TEMPLATE must be one of Restricted, Namespace, Any, got 'All'"):
        Settings.from_environment({"TRAINWRIGHT_ALLOW_POD_TEMPLATE": "All"})
    with pytest.raises(ValueError, match="must not name Kubernetes' own namespaces, got 'kube-system'; use another"):
        Settings.from_environment({"TRAINWRIGHT_WATCH_NAMESPACES": "team-a,kube-system"})


def test_winners_are_handed_over_freely_unless_the_settings_say_otherwise() -> None:
    assert Settings.from_environment({}).rules.handover == Handover(HandoverRule.FREE, None)
    chosen = Settings.from_environment({"TRAINWRIGHT_HANDOVER": "Owned", "TRAINWRIGHT_HANDOVER_MAX_HOURS": "1.5"})
    assert chosen.rules.handover == Handover(HandoverRule.OWNED, 1.5)
    assert chosen.rules.handover.max_seconds == 5400
    with pytest.raises(ValueError, match="TRAINWRIGHT_HANDOVER must be one of Free, Owned, Never, got 'Mine'"):
        Settings.from_environment({"TRAINWRIGHT_HANDOVER": "Mine"})
    for text in ("0", "-1", "nan", "inf", "long", "87601"):
        with pytest.raises(ValueError, match="MAX_HOURS must be a number of hours above 0, at most 87600, got"):
            Settings.from_environment({"TRAINWRIGHT_HANDOVER_MAX_HOURS": text})


def test_limits_of_tenants_are_absent_unless_they_are_set() -> None:
    assert Settings.from_environment({}).rules.limits == TenantLimits()
    variables = {
        "TRAINWRIGHT_MAX_PRIORITY": "0",
        "TRAINWRIGHT_PLANS_PER_NAMESPACE": "20",
        "TRAINWRIGHT_MAX_GRACE_SECONDS": "60",
    }
    chosen = Settings.from_environment(variables)
    assert chosen.rules.limits == TenantLimits(priority=0, plans_per_namespace=20, grace_seconds=60)
    assert Settings.from_environment(dict.fromkeys(variables, "")).rules.limits == TenantLimits()


@pytest.mark.parametrize(
    ("name", "text", "least"),
    [("MAX_PRIORITY", "-1", 0), ("PLANS_PER_NAMESPACE", "0", 1), ("MAX_GRACE_SECONDS", "1e9", 5)],
)
def test_wrong_limit_is_rejected_with_what_it_may_be(name: str, text: str, least: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number from {least} to 1000000000, or empty for no limit"):
        Settings.from_environment({f"TRAINWRIGHT_{name}": text})


@pytest.mark.parametrize("text", ["0", "65", "two"])
def test_wrong_number_of_concurrent_searches_is_rejected(text: str) -> None:
    assert Settings.from_environment({}).concurrent_searches == 1
    assert Settings.from_environment({"TRAINWRIGHT_CONCURRENT_SEARCHES": "3"}).concurrent_searches == 3
    with pytest.raises(ValueError, match=f"CONCURRENT_SEARCHES must be a number from 1 to 64, got '{text}'"):
        Settings.from_environment({"TRAINWRIGHT_CONCURRENT_SEARCHES": text})
