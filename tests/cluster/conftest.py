"""Fixtures of the real local cluster, started once per run, with the operator installed from this checkout's chart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from trainwright_demo.__main__ import bring_up_local_cluster
from trainwright_demo.install import OPERATOR_NAMESPACE, install_operator
from trainwright_demo.kubectl import Kubectl
from trainwright_operator.kubectl.client import condition

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 900.0  # of every wait: no test depends on how fast a busy machine is
POLL_SECONDS = 0.3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(2000))


@pytest.fixture(scope="session")
def kubectl() -> Kubectl:
    bring_up_local_cluster(ROOT / "deploy" / "local-cluster" / "cluster.yaml")
    cluster = Kubectl(kubeconfig=ROOT / ".local-cluster" / "kubeconfig")
    install_operator(cluster, local=True)
    return cluster


@dataclass(frozen=True)
class Workbench:
    """A test's own namespace, and commands in it."""

    kubectl: Kubectl

    @property
    def namespace(self) -> str:
        return self.kubectl.namespace

    def run(self, *arguments: str) -> str:
        return self.kubectl.run("--namespace", self.namespace, *arguments)

    def apply(self, plan: dict[str, Any]) -> str:
        manifest = json.dumps(plan)
        done = subprocess.run(
            ["kubectl", "--namespace", self.namespace, "apply", "-f", "-"],
            input=manifest,
            env=self.kubectl.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        name: str = plan["metadata"]["name"]
        return name

    def get(self, name: str) -> dict[str, Any]:
        return self.kubectl.get_plan(name)

    def wait(self, name: str, what: str, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the resource once it is `reached`. Fails with its status after the deadline."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        resource = self.get(name)
        while not reached(resource):
            assert time.monotonic() < deadline, (
                f"{what}: not within {DEADLINE_SECONDS:.0f} s; status: {json.dumps(resource.get('status'))}"
            )
            time.sleep(POLL_SECONDS)
            resource = self.get(name)
        return resource

    def wait_finished(self, name: str) -> dict[str, Any]:
        return self.wait(
            name,
            "an answer",
            lambda found: condition(found, "Succeeded").get("status", "Unknown") != "Unknown",
        )

    def wait_measured(self, name: str) -> dict[str, Any]:
        """Return the finished resource; deliberately skips where the machine stalled, so that a trial does not count."""
        resource = self.wait_finished(name)
        trials = resource["status"].get("trials", ())
        if any(trial.get("reason") == "EmulationTooSlow" for trial in trials):
            pytest.skip(f"the machine is too busy to emulate devices: {trials}")
        return resource

    def children(self) -> list[str]:
        """Names of the operator's objects that exist in the namespace."""
        listed = json.loads(self.run("get", "pytorchjobs,jobsets,jobs,pods,configmaps,services", "--output", "json"))
        return [
            f"{item['kind']}/{item['metadata']['name']}"
            for item in listed["items"]
            if item["metadata"]["name"] != "kube-root-ca.crt"
        ]

    def operator_pod(self) -> dict[str, Any]:
        listed = json.loads(
            self.kubectl.run(
                "--namespace",
                OPERATOR_NAMESPACE,
                "get",
                "pods",
                "--selector",
                "app.kubernetes.io/name=trainwright",
                "--output",
                "json",
            )
        )
        running = [pod for pod in listed["items"] if not pod["metadata"].get("deletionTimestamp")]
        assert running, "the operator has no pod"
        pod: dict[str, Any] = running[0]
        return pod

    def kill_operator(self) -> None:
        """Kill the operator's process and delete its pod, to avoid the restart back-off."""
        pod = self.operator_pod()
        self.kill_processes(pod)
        self.kubectl.run(
            "--namespace",
            OPERATOR_NAMESPACE,
            "delete",
            "pod",
            pod["metadata"]["name"],
            "--force",
            "--grace-period=0",
            "--wait=false",
        )

    def kill_processes(self, pod: dict[str, Any]) -> None:
        """Kill a pod's processes, which are found by its container's id."""
        container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
        killed = 0
        for process in Path("/proc").glob("[0-9]*"):
            try:
                inside = container in (process / "cgroup").read_text()
                if inside:
                    os.kill(int(process.name), signal.SIGKILL)
                    killed += 1
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended between the listing and now
        assert killed, f"no process of container {container} was found"


@pytest.fixture
def workbench(kubectl: Kubectl) -> Iterator[Workbench]:
    namespace = f"tw-{uuid.uuid4().hex[:8]}"
    kubectl.run("create", "namespace", namespace)
    yield Workbench(replace(kubectl, namespace=namespace))
    kubectl.run("delete", "namespace", namespace, "--wait=false")


@pytest.fixture
def small_plan() -> Callable[..., dict[str, Any]]:
    """Return a builder of TrainingPlans that take about a minute: two devices of one node, few iterations."""

    def build(name: str = "small", *, annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": {"gpt": {"layers": 4, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512}},
            "training": {"globalBatchSize": 8},
            "devices": {"max": 2},
            "search": {"planner": "Amp", "limits": {"maxTensorDegree": 1}},
            "profiling": {"warmupIterations": 1, "iterations": 3},
            "trials": {"topK": 2, "baseline": "None", "warmupIterations": 1, "iterations": 3},
        }
        return {
            "apiVersion": "trainwright.dev/v1alpha1",
            "kind": "TrainingPlan",
            "metadata": {"name": name, "annotations": annotations or {}},
            "spec": body | spec,
        }

    return build
