"""Requests that a policy denies: a real API server counts them, reads included, in its audit log."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import real_api_server
from operator_process import condition, deny, equip, jobs, make_pods, operator, until

from trainwright_operator.api import crd

MAX_TRIES = 4
MAX_REQUESTS = 12
MINUTE = 60.0
_OTHERS = {("list", "trainingplans"), ("get", "leases"), ("update", "leases")}
"""Requests for all plans of a namespace, whatever becomes of each."""

DENIED = {
    "pins": ("UPDATE", "", "pods", "false"),
    "creates": ("CREATE", "kubeflow.org", "pytorchjobs", "has(request.dryRun) && request.dryRun"),
    "documents": ("CREATE", "", "configmaps", "false"),
    "deletes": ("DELETE", "kubeflow.org", "pytorchjobs", "false"),
    "statuses": ("UPDATE", "trainwright.dev", "trainingplans/status", "false"),
}
"""Operation that a policy denies in each namespace, and the expression that has to hold for it to pass."""
TRIES = {
    "pins": ("patch", "pods"),
    "creates": ("create", "pytorchjobs"),
    "documents": ("create", "configmaps"),
    "deletes": ("delete", "pytorchjobs"),
    "statuses": ("patch", "trainingplans"),
}


def requests(log: Path, since: float, namespace: str = "") -> Counter[tuple[str, str]]:
    """Count the operator's requests for a namespace, or for the whole cluster, by verb and resource."""
    found = Counter[tuple[str, str]]()
    for event in map(json.loads, log.read_text().splitlines()):
        place = event.get("objectRef", {})
        asked = event["verb"], place.get("resource", "")
        is_ours = event["userAgent"].startswith("trainwright-operator/") and asked not in _OTHERS
        if is_ours and event["stageTimestamp"] >= _stamp(since) and place.get("namespace", "") == namespace:
            found[asked] += 1
    return found


def _stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_policy_denies_is_asked_for_rarely(programs: None, training_plan_of: Any, tmp_path: Path) -> None:
    policy = tmp_path / "all-requests.yaml"
    rules = [{"level": "None", "verbs": ["watch"]}, {"level": "Metadata"}]
    policy.write_text(
        json.dumps(
            {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules, "omitStages": ["RequestReceived"]}
        )
    )
    with ExitStack() as running:
        api = real_api_server.start(tmp_path, running, f"--audit-policy-file={policy}")
        api.kubectl("create", document=crd.crd_manifest())
        api.establish("crd/trainingplans.trainwright.dev")
        equip(api)
        for namespace, (operation, group, resource, expression) in DENIED.items():
            api.kubectl("create", "namespace", namespace)
            what = {"operation": operation, "group": group, "resource": resource, "expression": expression}
            deny(api, namespace, **what, message=f"no {namespace} today")
            api.create(training_plan_of(namespace, "denied"))
        running.enter_context(operator(api, "pins", tmp_path, *list(DENIED)[1:]))
        (job,) = until("a job for the links", 60, lambda: jobs(api, "pins"))
        make_pods(api, "pins", job)
        until("a job to delete", 60, lambda: jobs(api, "deletes"))
        edit = ("--type=merge", "--patch", '{"spec": {"suspend": true}}')
        api.kubectl("patch", "trainingplan", "denied", "--namespace", "deletes", *edit)

        def words(namespace: str) -> str:
            return str(condition(api, namespace, "denied", "Succeeded").get("message", ""))

        for namespace in ("pins", "creates", "documents"):
            until(f"words of the policy on {namespace}", 60, lambda: f"no {namespace} today" in words(namespace))  # noqa: B023
        for namespace, tried in TRIES.items():
            until(f"refused {namespace}", 60, lambda: requests(api.audit_log, 0.0, namespace)[tried])  # noqa: B023
        time.sleep(MINUTE)  # the first one, in which the pauses grow
        since = time.time()
        time.sleep(MINUTE)
        found = {namespace: requests(api.audit_log, since, namespace) for namespace in DENIED}
        for namespace, tried in TRIES.items():
            assert 1 <= found[namespace][tried] <= MAX_TRIES, found
            assert found[namespace].total() <= MAX_REQUESTS, found
        shared = requests(api.audit_log, since)  # reads of nodes and of all pods serve all plans
        assert shared.total() + sum(one.total() for one in found.values()) <= MAX_REQUESTS * len(DENIED), (
            found,
            shared,
        )
        for namespace in DENIED:
            api.kubectl("delete", "validatingadmissionpolicybinding", namespace)
        lifted = time.time()

        def goes_on(what: str, reached: Callable[[], Any]) -> None:
            until(what, MINUTE - (time.time() - lifted), reached)

        def is_pinned() -> bool:
            pods = api.get("pods", "--namespace", "pins")["items"]
            return not any(pod["spec"].get("schedulingGates") for pod in pods)

        goes_on("the job", lambda: jobs(api, "creates"))
        goes_on("the job after the documents", lambda: jobs(api, "documents"))
        goes_on("the pins", is_pinned)
        goes_on("the deletion", lambda: not jobs(api, "deletes"))
        goes_on("the status", lambda: condition(api, "statuses", "denied", "Accepted")["status"] == "True")
