"""Cost of the operator with many plans and many nodes: CPU, memory, requests and delays, on a real API server.

`python benchmarks/soak [--plans 1000] [--nodes 5000] [--minutes 20] [--only SCENARIO] [--write]`. No kubelet and no
training operator run: nodes and pods are objects whose status this program writes, so only the operator's own cost is measured. Times depend on the machine;
the API server and etcd share it.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import real_api_server
from flow_reports import links_report, report_of
from operator_figures import Operator
from real_api_server import ApiServer
from rich.console import Console
from rich.table import Table
from simulated_nodes import pods_of, running_status, simulated_nodes
from users import Users, churn, wait_for_answers

from trainwright.worker_api import LinkTask, WorkerTask
from trainwright_operator.api import API_VERSION, KIND, crd

RESULTS = Path(__file__).resolve().parents[1] / "results" / "soak.csv"
WATCHED_OPERATOR = Path(__file__).with_name("watched_operator.py")
NAMESPACE = "soak"
EMULATION = {"flops_per_second": 1e9, "floor_seconds": 0.001, "updated_parameters_per_second": 1e8}
CHUNK = 250
"""Objects of one kubectl command."""
WINDOW_SECONDS = 60.0


@dataclass(frozen=True)
class Figure:
    """One measured figure with its aim."""

    what: str
    value: float
    unit: str
    aim: str


def main() -> None:
    """Run the scenarios and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--minutes", type=float, default=20.0, help="of random changes with a kill a minute")
    parser.add_argument("--only", choices=("plans", "running", "nodes", "changes"), help="run only one scenario")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    wanted = parser.parse_args()
    scenarios: dict[str, Callable[[], Iterator[Figure]]] = {
        "plans": lambda: many_plans(wanted.plans),
        "running": one_running_plan,
        "nodes": lambda: many_nodes(wanted.nodes),
        "changes": lambda: many_changes(wanted.minutes),
    }
    figures: list[Figure] = []
    for scenario in [scenarios[wanted.only]] if wanted.only else scenarios.values():
        figures.extend(scenario())
        show(figures)
    if wanted.write:
        with RESULTS.open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(["figure", "value", "unit", "aim"])
            rows.writerows([one.what, f"{one.value:.4g}", one.unit, one.aim] for one in figures)


def show(figures: list[Figure]) -> None:
    """Print the figures so far."""
    table = Table("figure", "value", "aim", title="Cost of the operator")
    for one in figures:
        table.add_row(one.what, f"{one.value:.4g} {one.unit}", one.aim)
    Console(width=110).print(table)


def many_plans(count: int) -> Iterator[Figure]:
    """Apply plans at once, let them wait for their pods, then suspend them."""
    with cluster(nodes=2) as api, operator(api) as running:
        began, cpu = time.monotonic(), running.cpu_seconds
        for first in range(0, count, CHUNK):
            api.kubectl("create", document=[plan(f"plan-{n}") for n in range(first, min(first + CHUNK, count))])
        applied = time.monotonic() - began
        until("a job for each plan", 1200, lambda: objects(api, "kubeflow.org/v1", "pytorchjobs") >= count)
        what = f"{count} plans at once"
        yield Figure(f"{what}: all applied", applied, "s", "")
        yield Figure(f"{what}: each has its first job", time.monotonic() - began, "s", "60 s")
        yield Figure(f"{what}: CPU until then", running.cpu_seconds - cpu, "s", "25 s")
        yield Figure(
            f"{what}: wait of a pass, p99", running.quantile("trainwright_reconcile_wait_seconds", 0.99), "s", "5 s"
        )
        time.sleep(30)
        cores, requests = rates(api, running)
        yield Figure(f"{count} plans waiting for pods", cores, "cores", "0.2 cores")
        yield Figure("requests of a waiting plan", requests / count, "a minute", "15 a minute")
        yield Figure(f"{count} plans: largest memory", running.peak_bytes / 1e6, "MB", "250 MB")
        names = [f"trainingplan/plan-{number}" for number in range(count)]
        for first in range(0, count, CHUNK):
            merge = ["--type=merge", "--patch", '{"spec":{"suspend":true}}']
            api.kubectl("patch", "--namespace", NAMESPACE, *names[first : first + CHUNK], *merge)
        until("no job", 1200, lambda: objects(api, "kubeflow.org/v1", "pytorchjobs") == 0)
        time.sleep(30)
        cores, requests = rates(api, running)
        yield Figure(f"{count} plans at rest", cores, "cores", "0.02 cores")
        yield Figure("largest memory at the end", running.peak_bytes / 1e6, "MB", "250 MB")
        yield from hold(f"{count} plans", running, since=began)


def one_running_plan() -> Iterator[Figure]:
    """Let a plan's first gang run."""
    with cluster(nodes=2) as api, operator(api) as running:
        began = time.monotonic()
        api.kubectl("create", document=plan("plan"))
        until("a job", 60, lambda: objects(api, "kubeflow.org/v1", "pytorchjobs") == 1)
        (job,) = api.get("pytorchjobs", "--namespace", NAMESPACE)["items"]
        pods = pods_of(job)
        api.kubectl("create", document=pods)
        until("placement", 60, lambda: not any(gates(api)))
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        for pod in pods:
            patch_status(api, "pod", pod["metadata"]["name"], running_status(now))
        time.sleep(15)
        cores, requests = rates(api, running)
        yield Figure("requests of a plan whose gang runs", requests, "a minute", "15 a minute")
        yield Figure("a plan whose gang runs", cores, "cores", "")
        yield from hold("a plan whose gang runs", running, since=began)


def many_nodes(count: int) -> Iterator[Figure]:
    """Discover many nodes in racks of 8, of which a plan takes as many as it may, measure their links and describe them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        api = stack.enter_context(cluster(nodes=0))
        _, port = stack.enter_context(simulated_nodes(api, NAMESPACE, folder, run_seconds=2.0, report=report_of_racks))
        for first in range(0, count, CHUNK):
            numbers = range(first, min(first + CHUNK, count))
            api.kubectl("create", document=[node(number, port, place_of(number)) for number in numbers])
        running = stack.enter_context(operator(api))
        cpu, began = running.cpu_seconds, time.monotonic()
        api.kubectl("create", document=plan("plan", {"devices": {"max": 4096}, "search": {"planner": "Megatron"}}))
        until("discovery", 300, lambda: condition(api, "NodesDiscovered") == "True")
        what = f"{count} nodes"
        yield Figure(f"{what} discovered", time.monotonic() - began, "s", "5 s")
        yield Figure(f"{what}: CPU", running.cpu_seconds - cpu, "s", "")
        yield from hold(f"{what} discovered", running, since=began)
        until("links", 300, lambda: condition(api, "LinksMeasured") == "True")
        yield Figure(f"{what}: CPU until the links are known", running.cpu_seconds - cpu, "s", "")
        until("the cluster", 300, lambda: bool(status_of(api).get("clusterRef")))
        (stored,) = [one for one in api.get("configmaps", "--namespace", NAMESPACE)["items"] if is_cluster(one)]
        yield Figure(f"{what}: CPU until the cluster is stored", running.cpu_seconds - cpu, "s", "")
        yield Figure(f"{what}: cluster, as stored", len(json.dumps(stored)) / 1e3, "kB", "1000 kB")
        yield from hold(what, running, since=began)
        yield Figure(f"{what}: largest memory", running.peak_bytes / 1e6, "MB", "250 MB")
        yield Figure(f"{what}: largest memory of the decision process", running.decisions_peak_bytes / 1e6, "MB", "")
        yield Figure(f"{what}: status", len(json.dumps(status_of(api))) / 1e3, "kB", "100 kB")


def hold(what: str, running: Operator, since: float) -> Iterator[Figure]:
    """Return how long the loop was held at most, and how much CPU the operator took in one hold."""
    holds = running.holds(since)
    yield Figure(f"{what}: longest hold of the loop", max((late for late, _ in holds), default=0.0), "s", "0.2 s")
    yield Figure(f"{what}: CPU of one hold", max((busy for _, busy in holds), default=0.0), "s", "0.2 s")


def place_of(number: int) -> dict[str, str]:
    """Return the labels of a node's rack and zone."""
    places = {"rack": f"rack-{number // 8}", "zone": f"zone-{number // 512}"}
    return {f"topology.kubernetes.io/{key}": place for key, place in places.items()}


def report_of_racks(task: WorkerTask) -> Any:
    """Return a report of links that are faster inside racks."""
    if not isinstance(task, LinkTask):
        return report_of(task)
    rack = {one.name: int(one.name.removeprefix("node-")) // 8 for one in task.gang.nodes}
    return links_report(task, lambda one, other: 1e10 if rack[one] == rack[other] else 1e9)


def is_cluster(config_map: dict[str, Any]) -> bool:
    return str(config_map["metadata"]["name"]).endswith("-cluster")


def many_changes(minutes: float) -> Iterator[Figure]:
    """Create, edit, suspend and delete up to 100 plans at random while the operator is killed every minute."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        api = stack.enter_context(cluster(nodes=0))
        nodes, port = stack.enter_context(simulated_nodes(api, NAMESPACE, folder, run_seconds=2.0))
        api.kubectl("create", document=[node(number, kubelet_port=port) for number in range(40)])
        running = ExitStack()
        stack.callback(running.close)
        current = running.enter_context(operator(api))

        def kill() -> None:
            nonlocal current
            current.process.kill()
            running.close()
            current = running.enter_context(operator(api))

        users = Users(api, NAMESPACE, plan, most=100, chance=random.Random(26))  # noqa: S311 - no secret
        churn(users, 60 * minutes, kill)
        answers = wait_for_answers(users, nodes)
        what = f"{minutes:g} minutes of changes"
        yield Figure(f"{what}: actions", users.done.total(), "", "")
        yield Figure(f"{what}: kills", users.done["kill"], "", "")
        yield Figure(f"{what}: tasks that ran", len(nodes.completed), "", "")
        twice = sorted(name for (_, name), count in nodes.completed.items() if count > 1)
        yield Figure(f"{what}: tasks that ran twice", len(twice), " ".join(twice), "0")
        yield Figure(f"{what}: plans with a winner", answers["True"], "", "")
        yield Figure(f"{what}: plans without an answer", answers.total() - answers["True"], "", "0")
        yield Figure(f"{what}: jobs after all answers", objects(api, "kubeflow.org/v1", "pytorchjobs"), "", "0")
        users.delete_all()
        time.sleep(30)
        kinds = ("configmaps", "pods", "pytorchjobs", "trainingplans")
        left = [one for kind in kinds for one in api.get(kind, "--namespace", NAMESPACE)["items"]]
        yield Figure(f"{what}: objects left after all plans were deleted", len(left), "", "0")


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
    kinds = "trainingplans|pods|pytorchjobs|configmaps|nodes|events|resourceslices"
    total = 0.0
    for line in api.kubectl("get", "--raw", "/metrics").splitlines():
        is_request = line.startswith("apiserver_request_total{") and not re.search(
            'verb="WATCH"|subresource="log"', line
        )
        if is_request and re.search(rf'resource="({kinds})"', line):
            total += float(line.rsplit(" ", 1)[1])
    return total


def until(what: str, seconds: float, reached: Callable[[], bool]) -> None:
    """Wait for something; fail when it takes longer."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.5)


def free_port() -> int:
    """Return a free port of loopback."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
