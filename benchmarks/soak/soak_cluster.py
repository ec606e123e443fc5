"""API server, nodes, plans and operator of the benchmark, and what they show."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import real_api_server
from operator_figures import Operator
from operator_process import free_port, until
from real_api_server import ApiServer

from trainwright_operator.api import API_VERSION, KIND, crd

WATCHED_OPERATOR = Path(__file__).with_name("watched_operator.py")
NAMESPACE = "soak"
EMULATION = {"flops_per_second": 1e9, "floor_seconds": 0.001, "updated_parameters_per_second": 1e8}
CHUNK = 250
"""Objects of one kubectl command."""
WINDOW_SECONDS = 60.0


@contextmanager
def cluster(nodes: int) -> Iterator[ApiServer]:
    """Start an API server with the definitions, a namespace and nodes of two emulated devices each."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        api = real_api_server.start(folder, stack)
        api.kubectl("create", document=[crd.crd_manifest(), real_api_server.pytorch_job_definition()])
        for name in ("trainingplans.trainwright.dev", "pytorchjobs.kubeflow.org"):
            api.establish(f"crd/{name}")
        api.kubectl("create", "namespace", NAMESPACE)
        for first in range(0, nodes, CHUNK):
            api.kubectl("create", document=[node(n) for n in range(first, min(first + CHUNK, nodes))])
        yield api


@contextmanager
def operator(api: ApiServer) -> Iterator[Operator]:
    """Run the operator and wait until it holds its lease."""
    ports = [free_port(), free_port()]
    environment = os.environ | {
        "KUBECONFIG": str(api.kubeconfig),
        "TRAINWRIGHT_WORKER_IMAGE": "worker:test",
        "TRAINWRIGHT_WATCH_NAMESPACES": NAMESPACE,
        "TRAINWRIGHT_LEASE_NAMESPACE": NAMESPACE,
        "TRAINWRIGHT_METRICS_PORT": str(ports[0]),
        "TRAINWRIGHT_HEALTH_PORT": str(ports[1]),
        "TRAINWRIGHT_LOG_LEVEL": "error",
    }
    holds = api.kubeconfig.with_name(f"holds-{ports[0]}")
    holds.touch()
    process = subprocess.Popen([sys.executable, WATCHED_OPERATOR, holds], env=environment)
    try:
        until("the lease", 60, lambda: objects(api, "coordination.k8s.io/v1", "leases") >= 1)
        time.sleep(3)
        yield Operator(process, ports[0], holds)
    finally:
        process.terminate()
        process.wait(timeout=60)


def plan(name: str, further: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a small TrainingPlan."""
    sizes = {"layers": 4, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512}
    spec = {"model": {"gpt": sizes}, "training": {"globalBatchSize": 8}} | (further or {})
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}


def node(number: int, kubelet_port: int = 0, place: dict[str, str] | None = None) -> dict[str, Any]:
    """Return a node with two emulated devices and labels as many as clouds set, those of its place among them."""
    labels = {f"example.com/label-{index}": "value" for index in range(20)} | (place or {})
    labels |= {"nvidia.com/gpu.product": "emulated-v100", "nvidia.com/gpu.memory": "16384"}
    devices = {"nvidia.com/gpu": "2", "cpu": "8", "memory": "64Gi"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": f"node-{number:04}",
            "labels": labels,
            "annotations": {"trainwright.dev/emulation": json.dumps(EMULATION)},
        },
        "status": {
            "capacity": devices,
            "allocatable": devices,
            "conditions": [{"type": "Ready", "status": "True"}],
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelet_port}},
        },
    }


def patch_status(api: ApiServer, kind: str, name: str, status: dict[str, Any]) -> None:
    """Write an object's status."""
    where = ["--namespace", NAMESPACE, "--subresource", "status"]
    api.kubectl("patch", kind, name, *where, "--type=merge", "--patch", json.dumps({"status": status}))


def gates(api: ApiServer) -> list[Any]:
    """Return the scheduling gates of each pod."""
    return [pod["spec"].get("schedulingGates") for pod in api.get("pods", "--namespace", NAMESPACE)["items"]]


def condition(api: ApiServer, kind: str) -> str:
    """Return the status of a condition of the plan."""
    conditions = status_of(api).get("conditions", [])
    return next((str(one["status"]) for one in conditions if one["type"] == kind), "Unknown")


def status_of(api: ApiServer) -> dict[str, Any]:
    """Return the status of the plan."""
    found: dict[str, Any] = api.get("trainingplan", "plan", "--namespace", NAMESPACE).get("status", {})
    return found


def objects(api: ApiServer, version: str, kind: str) -> int:
    """Count the objects of a kind in the namespace, without reading them."""
    page = json.loads(api.kubectl("get", "--raw", f"/apis/{version}/namespaces/{NAMESPACE}/{kind}?limit=1"))
    return len(page["items"]) + int(page["metadata"].get("remainingItemCount", 0))


def rates(api: ApiServer, running: Operator) -> tuple[float, float]:
    """Return the operator's cores, and the API server's requests a minute, over a while in which nothing else asks."""
    cpu, requests, began = running.cpu_seconds, request_count(api), time.monotonic()
    time.sleep(WINDOW_SECONDS)
    seconds = time.monotonic() - began
    return (running.cpu_seconds - cpu) / seconds, (request_count(api) - requests) / seconds * 60


def request_count(api: ApiServer) -> float:
    """Return the number of requests so far, without watches, leases and logs."""
    kinds = "trainingplans|pods|pytorchjobs|jobsets|configmaps|nodes|events|resourceslices|deviceclasses|resourceclaims"
    total = 0.0
    for line in api.kubectl("get", "--raw", "/metrics").splitlines():
        is_request = line.startswith("apiserver_request_total{") and not re.search(
            'verb="WATCH"|subresource="log"', line
        )
        if is_request and re.search(rf'resource="({kinds})"', line):
            total += float(line.rsplit(" ", 1)[1])
    return total
