"""Plans in a queue of a real Kueue: quota that is used up, preemption, one node for two plans, a restart of Kueue."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from local_cluster.binaries import KUEUES
from trainwright_operator.kubectl.client import condition

ROOT = Path(__file__).resolve().parents[2]
PRODUCT, RESOURCE = "nvidia.com/gpu.product", "nvidia.com/gpu"
KUEUE, JOBSET = "kueue.x-k8s.io/v1beta2", "jobset.x-k8s.io/v1alpha2"
LONG_TRIALS = {"topK": 1, "baseline": "None", "warmupIterations": 1, "iterations": 400}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True, params=KUEUES)
def _kueue(kubectl, request) -> None:
    """Install a release of Kueue on the running cluster, each over the one before; the last one stays."""
    release = ("--kueue", "--kueue-release", request.param)
    subprocess.run([sys.executable, "-m", "local_cluster", "up", *release], cwd=ROOT, check=True)


def manifest(kind: str, name: str, spec: dict[str, Any], api: str = KUEUE, **labels: str) -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": labels}, "spec": spec}


@pytest.fixture
def queue(workbench):
    """Return a function that makes the test's queue with quotas of devices by accelerator."""

    def flavor(accelerator: str, devices: int, topology: dict[str, str]) -> dict[str, Any]:
        quotas = ((RESOURCE, devices), ("cpu", 100), ("memory", "200Gi"))
        name = "-".join((accelerator, *topology.values()))  # a flavor's topology cannot be changed
        workbench.apply(
            manifest("ResourceFlavor", name, {"nodeLabels": {PRODUCT: f"emulated-{accelerator}"}, **topology})
        )
        return {"name": name, "resources": [{"name": one, "nominalQuota": quota} for one, quota in quotas]}

    def make(topology: str = "", **devices: int) -> str:
        """`topology`: name of one with the nodes as its only level, by which Kueue places pods."""
        name = workbench.namespace
        if topology:
            workbench.apply(manifest("Topology", topology, {"levels": [{"nodeLabel": "kubernetes.io/hostname"}]}))
        flavors = [flavor(*one, {"topologyName": topology} if topology else {}) for one in devices.items()]
        group = {"coveredResources": [RESOURCE, "cpu", "memory"], "flavors": flavors}
        rules = {"resourceGroups": [group], "namespaceSelector": {}, "preemption": {"withinClusterQueue": "LowerPriority"}}  # fmt: skip
        workbench.apply(manifest("ClusterQueue", name, rules))
        workbench.apply(manifest("LocalQueue", "research", {"clusterQueue": name}))
        for priority, value in (("low", 1), ("high", 1000)):
            made = manifest("WorkloadPriorityClass", priority, {})
            del made["spec"]
            workbench.apply(made | {"value": value})
        return "research"

    return make


def holder(queue: str, priority: str) -> dict[str, Any]:
    """Return a JobSet that holds two V100s."""
    container = {
        "name": "sleeper",
        "image": "docker.io/trainwright/worker:dev",
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "900"],
        "resources": {"limits": {RESOURCE: 2}, "requests": {"cpu": "10m", "memory": "16Mi"}},
    }
    pod = {"spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}}
    job = {"name": "s0", "replicas": 1, "template": {"spec": {"parallelism": 1, "completions": 1, "template": pod}}}
    labels = {"kueue.x-k8s.io/queue-name": queue, "kueue.x-k8s.io/priority-class": priority}
    return manifest("JobSet", "holder", {"suspend": True, "replicatedJobs": [job]}, JOBSET, **labels)


def waits_for(kind: str, reason: str):
    return lambda found: condition(found, kind).get("reason") == reason


def is_running(workbench, gang: str) -> bool:
    listed = json.loads(workbench.run("get", "pods", "--selector", f"trainwright.dev/gang={gang}", "--output", "json"))[
        "items"
    ]
    return bool(listed) and all(pod["status"].get("phase") == "Running" for pod in listed)


def test_plan_waits_in_kueues_words_while_its_quota_is_used(workbench, small_plan, queue) -> None:
    name = queue(v100=2)
    workbench.apply(holder(name, "low"))
    workbench.run("wait", "pods", "--all", "--for=condition=Ready", "--timeout=60s")
    plan = workbench.apply(small_plan(queueName=name, queuePriorityClass="low"))
    found = workbench.wait(plan, "a wait for quota", waits_for("Succeeded", "WaitingForQuota"))
    assert "insufficient" in condition(found, "Succeeded")["message"]
    assert found["status"]["cluster"]["devices"] == 2
    workbench.run("delete", "jobset", "holder")
    assert condition(workbench.wait_measured(plan), "Succeeded")["status"] == "True"
    assert not json.loads(workbench.run("get", "workloads", "--output", "json"))["items"]


def test_preempted_trial_runs_again_once_the_quota_is_back(workbench, small_plan, queue) -> None:
    name = queue(v100=2)
    plan = workbench.apply(small_plan(queueName=name, queuePriorityClass="low", trials=LONG_TRIALS))
    workbench.wait(plan, "a running trial", lambda _: is_running(workbench, "candidate-1"))
    workbench.apply(holder(name, "high"))
    lost = workbench.wait(
        plan,
        "the loss of the trial",
        lambda found: any(one.get("reason") == "Evicted" for one in found["status"]["trials"]),
    )
    (trial,) = lost["status"]["trials"]
    assert trial["state"] == "Pending"
    assert "reempted" in trial["message"]
    workbench.wait(plan, "a wait for quota", waits_for("TrialsCompleted", "WaitingForQuota"))
    workbench.run("delete", "jobset", "holder")
    (trial,) = workbench.wait_measured(plan)["status"]["trials"]
    assert trial["state"] == "Succeeded"


def test_gang_of_two_accelerators_is_admitted_whole_each_part_in_its_flavor(workbench, small_plan, queue) -> None:
    plan = workbench.apply(small_plan(queueName=queue(v100=2, t4=2), devices={}))
    found = workbench.wait(plan, "a chosen cluster", lambda found: "cluster" in found.get("status", {}))
    assert sorted(node["accelerator"] for node in found["status"]["cluster"]["nodes"]) == [
        "emulated-t4",
        "emulated-v100",
    ]
    workbench.wait(plan, "running links", lambda _: is_running(workbench, "links"))
    (workload,) = json.loads(workbench.run("get", "workloads", "--output", "json"))["items"]
    assigned = [one["flavors"][RESOURCE] for one in workload["status"]["admission"]["podSetAssignments"]]
    assert sorted(assigned) == ["t4", "v100"]
    assert condition(workbench.wait_measured(plan), "Succeeded")["status"] == "True"


def test_two_plans_with_quota_that_want_one_node_run_one_after_the_other(workbench, small_plan, queue) -> None:
    name = queue(v100=4)
    one_node = {"nodeSelector": {"kubernetes.io/hostname": "node-1"}}
    plans = [workbench.apply(small_plan(one, queueName=name, devices=one_node)) for one in ("first", "second")]
    for plan in plans:
        finished = workbench.wait_measured(plan)
        assert condition(finished, "Succeeded")["status"] == "True"
        assert [node["name"] for node in finished["status"]["cluster"]["nodes"]] == ["node-1"]


def test_pods_that_kueue_places_run_on_the_nodes_of_the_plan(workbench, small_plan, queue) -> None:
    name = queue("hosts", v100=2, t4=2)
    plan = workbench.apply(small_plan(queueName=name, devices={}))
    workbench.wait(plan, "running links", lambda _: is_running(workbench, "links"))
    (workload,) = json.loads(workbench.run("get", "workloads", "--output", "json"))["items"]
    assert all("topologyAssignment" in one for one in workload["status"]["admission"]["podSetAssignments"])
    finished = workbench.wait_measured(plan)
    assert condition(finished, "Succeeded")["status"] == "True", finished["status"]
    assert len(finished["status"]["cluster"]["nodes"]) == 2
    assert all(trial["state"] == "Succeeded" for trial in finished["status"]["trials"])


def test_plan_goes_on_after_kueue_restarted(workbench, small_plan, queue) -> None:
    plan = workbench.apply(small_plan(queueName=queue(v100=2), trials=LONG_TRIALS))
    workbench.wait(plan, "profiling", lambda found: condition(found, "LinksMeasured").get("status") == "True")
    restart = ("--namespace", "kueue-system", "delete", "pods", "--all", "--force", "--grace-period=0")
    workbench.kubectl.run(*restart)
    workbench.wait(plan, "a running trial", lambda _: is_running(workbench, "candidate-1"))
    workbench.kubectl.run(*restart)
    finished = workbench.wait_measured(plan)
    assert condition(finished, "Succeeded")["status"] == "True"
    assert {trial["state"] for trial in finished["status"]["trials"]} == {"Succeeded"}
