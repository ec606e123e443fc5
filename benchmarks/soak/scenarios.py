"""Scenarios of the benchmark: many plans, one running plan, many nodes, random changes with kills."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flow_reports import links_report, report_of
from operator_figures import Operator
from operator_process import until
from simulated_nodes import pods_of, running_status, simulated_nodes
from soak_cluster import (
    CHUNK,
    NAMESPACE,
    cluster,
    condition,
    gates,
    node,
    objects,
    operator,
    patch_status,
    plan,
    rates,
    status_of,
)
from users import Users, churn, wait_for_answers

from trainwright.worker_api import LinkTask, WorkerTask


@dataclass(frozen=True)
class Figure:
    """One measured figure with its aim, and what it was before the cache and the decision process, if that is known."""

    what: str
    value: float
    unit: str
    aim: str
    before: str = ""


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
        yield Figure(f"{what}: each has its first job", time.monotonic() - began, "s", "60 s", "124 s")
        yield Figure(f"{what}: CPU until then", running.cpu_seconds - cpu, "s", "25 s", "64 s")
        yield Figure(
            f"{what}: wait of a pass, p99", running.quantile("trainwright_reconcile_wait_seconds", 0.99), "s", "5 s"
        )
        time.sleep(30)  # deliberate: the plans' waits grow until looks at them are rare, as they are measured
        cores, requests = rates(api, running)
        yield Figure(f"{count} plans waiting for pods", cores, "cores", "0.2 cores", "0.6 cores")
        yield Figure("requests of a waiting plan", requests / count, "a minute", "15 a minute")
        yield Figure(f"{count} plans: largest memory", running.peak_bytes / 1e6, "MB", "250 MB", "213 MB")
        names = [f"trainingplan/plan-{number}" for number in range(count)]
        for first in range(0, count, CHUNK):
            merge = ["--type=merge", "--patch", '{"spec":{"suspend":true}}']
            api.kubectl("patch", "--namespace", NAMESPACE, *names[first : first + CHUNK], *merge)
        until("no job", 1200, lambda: objects(api, "kubeflow.org/v1", "pytorchjobs") == 0)
        time.sleep(30)  # deliberate: what the suspensions caused ends before the rest is measured
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
        time.sleep(15)  # deliberate: the start of the gang is over before its running is measured
        cores, requests = rates(api, running)
        yield Figure("requests of a plan whose gang runs", requests, "a minute", "15 a minute", "121 a minute")
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
        yield Figure(f"{what} discovered", time.monotonic() - began, "s", "5 s", "24 s of CPU")
        yield Figure(f"{what}: CPU", running.cpu_seconds - cpu, "s", "")
        yield from hold(f"{what} discovered", running, since=began)
        until("links", 300, lambda: condition(api, "LinksMeasured") == "True")
        yield Figure(f"{what}: CPU until the links are known", running.cpu_seconds - cpu, "s", "")
        until("the cluster", 300, lambda: bool(status_of(api).get("clusterRef")))
        (stored,) = [one for one in api.get("configmaps", "--namespace", NAMESPACE)["items"] if is_cluster(one)]
        yield Figure(f"{what}: CPU until the cluster is stored", running.cpu_seconds - cpu, "s", "")
        yield Figure(f"{what}: cluster, as stored", len(json.dumps(stored)) / 1e3, "kB", "1000 kB", "1081 kB")
        yield from hold(what, running, since=began)
        yield Figure(f"{what}: largest memory", running.peak_bytes / 1e6, "MB", "250 MB")
        yield Figure(f"{what}: largest memory of the decision process", running.decisions_peak_bytes / 1e6, "MB", "")
        yield Figure(f"{what}: status", len(json.dumps(status_of(api))) / 1e3, "kB", "100 kB")


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
        time.sleep(30)  # deliberate: garbage collection gets its time before what is left counts as left
        kinds = ("configmaps", "networkpolicies", "pods", "pytorchjobs", "trainingplans")
        left = [one for kind in kinds for one in api.get(kind, "--namespace", NAMESPACE)["items"]]
        yield Figure(f"{what}: objects left after all plans were deleted", len(left), "", "0")


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
