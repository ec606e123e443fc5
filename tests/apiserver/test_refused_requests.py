"""Requests that a policy denies: a real API server counts them, reads included, in its audit log."""

from __future__ import annotations

import json
import time
from collections import Counter
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


def requests(log: Path, namespace: str, since: float) -> Counter[tuple[str, str]]:
    """Count the operator's requests for a namespace, and those for the whole cluster, by verb and resource."""
    found = Counter[tuple[str, str]]()
    for event in map(json.loads, log.read_text().splitlines()):
        place = event.get("objectRef", {})
        asked = event["verb"], place.get("resource", "")
        is_ours = event["userAgent"].startswith("trainwright-operator/") and asked not in _OTHERS
        if is_ours and event["stageTimestamp"] >= _stamp(since) and place.get("namespace", namespace) == namespace:
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
        for namespace in ("pins", "creates"):
            api.kubectl("create", "namespace", namespace)
        pods = {"operation": "UPDATE", "group": "", "resource": "pods"}
        deny(api, "pins", **pods, expression="false", message="pods stay as they were made")
        made = {"operation": "CREATE", "group": "kubeflow.org", "resource": "pytorchjobs"}
        deny(api, "creates", **made, expression="has(request.dryRun) && request.dryRun", message="no jobs today")
        for namespace in ("pins", "creates"):
            api.create(training_plan_of(namespace, "denied"))
        running.enter_context(operator(api, "pins", tmp_path, "creates"))
        (job,) = until("a job for the links", 60, lambda: jobs(api, "pins"))
        make_pods(api, "pins", job)

        def words(namespace: str) -> str:
            return str(condition(api, namespace, "denied", "Succeeded").get("message", ""))

        until("words of the pins' policy", 60, lambda: "pods stay as they were made" in words("pins"))
        until("words of the creations' policy", 60, lambda: "no jobs today" in words("creates"))
        time.sleep(MINUTE)  # the first one, in which the pauses grow
        since = time.time()
        time.sleep(MINUTE)
        pins, creates = requests(api.audit_log, "pins", since), requests(api.audit_log, "creates", since)
        assert 1 <= pins["patch", "pods"] <= MAX_TRIES, pins
        assert 1 <= creates["create", "pytorchjobs"] <= MAX_TRIES, creates
        assert max(pins.total(), creates.total()) <= MAX_REQUESTS, (pins, creates)
        for namespace in ("pins", "creates"):
            api.kubectl("delete", "validatingadmissionpolicybinding", namespace)
        lifted = time.time()
        until("the job", MINUTE, lambda: jobs(api, "creates"))

        def is_pinned() -> bool:
            pods = api.get("pods", "--namespace", "pins")["items"]
            return not any(pod["spec"].get("schedulingGates") for pod in pods)

        until("the pins", MINUTE - (time.time() - lifted), is_pinned)
