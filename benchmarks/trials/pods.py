"""Runner of tasks in pods of the local cluster: a pod on each node, in a namespace of its own."""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from trainwright import documents
from trainwright.worker_api import FAILURE_MARKER, REPORT_MARKER, Gang, WorkerReport, WorkerTask
from trainwright_demo.kubectl import Kubectl
from trainwright_operator.api.pods import PodTemplate
from trainwright_operator.flow.gangs import pod_template

IMAGE = "trainwright/worker:dev"
RESOURCE = "nvidia.com/gpu"
POLL_SECONDS = 1.0
START_SECONDS = 180.0


@dataclass(frozen=True)
class Bench:
    """Namespace on the local cluster in which tasks run one after another."""

    kubectl: Kubectl

    def run(self, order: WorkerTask) -> WorkerReport:
        """Run a task and return the gang's report.

        Raise RuntimeError with the workers' messages where there is none.
        """
        name = f"gang-{uuid.uuid4().hex[:8]}"
        self._apply(self._objects(name, order))
        try:
            return self._await(name, order.gang)
        finally:
            self.kubectl.run(
                "--namespace", self.kubectl.namespace, "delete", "pods,configmaps,services",
                "--selector", f"gang={name}", "--wait", "--grace-period=1",
            )  # fmt: skip

    def _apply(self, objects: list[dict[str, Any]]) -> None:
        manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        command = ["kubectl", "--namespace", self.kubectl.namespace, "create", "-f", "-"]
        done = subprocess.run(
            command, input=manifest, env=self.kubectl.environment, capture_output=True, text=True, check=False,
            timeout=60,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr)

    def _objects(self, name: str, order: WorkerTask) -> list[dict[str, Any]]:
        labels = {"gang": name}
        config = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "labels": labels},
            "data": {pod_template.TASK_FILE: documents.dumps(order)},
        }
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {**labels, "place": "0"},
                "ports": [{"name": "rendezvous", "port": pod_template.RENDEZVOUS_PORT}],
            },
        }
        pods = [
            self._pod(name, place, node.name, len(node.slots), labels | {"place": str(place)})
            for place, node in enumerate(order.gang.nodes)
        ]
        return [config, service, *pods]

    def _pod(self, gang: str, place: int, node: str, devices: int, labels: dict[str, str]) -> dict[str, Any]:
        template = pod_template.render(
            image=IMAGE, task_map=gang, resource_name=RESOURCE, devices=devices, labels=labels,
            template=PodTemplate(), container=pod_template.worker_container(gang),
        )  # fmt: skip
        spec = {key: value for key, value in template["spec"].items() if key != "schedulingGates"}
        metadata = {"name": f"{gang}-{place}", "labels": labels}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec | {"nodeName": node}}

    def _await(self, name: str, gang: Gang) -> WorkerReport:
        deadline = time.monotonic() + START_SECONDS + gang.deadline_seconds
        while time.monotonic() < deadline:
            phases = self._phases(name)
            if "Failed" in phases or phases == {"Succeeded"}:
                break
            time.sleep(POLL_SECONDS)
        lines = [line for place in range(len(gang.nodes)) for line in self._log(f"{name}-{place}")]
        for line in lines:
            marker, _, body = line.partition(" ")
            if marker == REPORT_MARKER:
                report: WorkerReport = documents.loads(body, WorkerReport)
                return report
        said = [line for line in lines if line.startswith(FAILURE_MARKER)] or lines[-20:]
        raise RuntimeError(f"{name} gave no report: " + "\n".join(said))

    def _phases(self, name: str) -> set[str]:
        listed = self.kubectl.run(
            "--namespace", self.kubectl.namespace, "get", "pods", "--selector", f"gang={name}", "--output", "json"
        )
        return {pod["status"].get("phase", "Pending") for pod in json.loads(listed)["items"]}

    def _log(self, pod: str) -> list[str]:
        return self.kubectl.run("--namespace", self.kubectl.namespace, "logs", pod).splitlines()


@contextmanager
def bench_on(kubectl: Kubectl) -> Iterator[Bench]:
    """Open a bench in a fresh namespace, which is deleted afterwards."""
    namespace = f"trials-{uuid.uuid4().hex[:8]}"
    kubectl.run("create", "namespace", namespace)
    try:
        yield Bench(replace(kubectl, namespace=namespace))
    finally:
        kubectl.run("delete", "namespace", namespace, "--wait=false")
