"""Limits of tenants on a real API server: what plans wait for, and whose place is the next."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from operator_process import operator, until


def accepted(api: Any, namespace: str, name: str) -> dict[str, Any]:
    status = api.get("trainingplan", name, "--namespace", namespace).get("status", {})
    found = (one for one in status.get("conditions", []) if one["type"] == "Accepted")
    return next(found, {"status": "", "reason": "", "message": ""})


def test_plans_beyond_the_limits_wait_also_after_a_kill_and_go_on_when_there_is_room(
    equipped_api_server, namespace, training_plan, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = equipped_api_server
    for name, value in {"MAX_PRIORITY": "10", "PLANS_PER_NAMESPACE": "1", "MAX_GRACE_SECONDS": "60"}.items():
        monkeypatch.setenv(f"TRAINWRIGHT_{name}", value)
    long = {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 3600}}}

    def reason(name: str) -> str:
        return str(accepted(api, namespace, name)["reason"])

    with operator(api, namespace, tmp_path) as (process, _, log):
        api.create(training_plan("urgent", {"priority": 11}))
        api.create(training_plan("long", {"worker": long}))
        until("a priority that waits", 40, lambda: reason("urgent") == "PriorityNotAllowed")
        until("a grace that waits", 40, lambda: reason("long") == "PodTemplateNotAllowed")
        api.create(training_plan("first"))
        until("a plan under way", 40, lambda: accepted(api, namespace, "first")["status"] == "True")
        api.create(training_plan("second"))
        until("a plan that waits for a place", 40, lambda: reason("second") == "PlanLimitReached")
        assert "is 1, and first is under way in this namespace" in accepted(api, namespace, "second")["message"]
        process.kill()
    created = api.get("trainingplan", "second", "--namespace", namespace)["metadata"]["creationTimestamp"]
    # Plans of one second have no order that a test may expect.
    until("a later second", 5, lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") > created)
    with operator(api, namespace, tmp_path) as (_, _, log):
        api.create(training_plan("third"))
        until("its number", 40, lambda: "1 plan waits before this one" in accepted(api, namespace, "third")["message"])
        assert reason("third") == "PlanLimitReached"
        assert accepted(api, namespace, "first")["status"] == "True", log.read_text()
        suspend = '{"spec":{"suspend":true}}'
        api.kubectl("patch", "trainingplan", "first", "--namespace", namespace, "--type=merge", "--patch", suspend)
        until("the place of the oldest", 60, lambda: accepted(api, namespace, "second")["status"] == "True")
        until("its name", 60, lambda: "and second is under way" in accepted(api, namespace, "third")["message"])
        lower = '{"spec":{"priority":10}}'
        api.kubectl("patch", "trainingplan", "urgent", "--namespace", namespace, "--type=merge", "--patch", lower)
        until("its turn for a place", 40, lambda: reason("urgent") == "PlanLimitReached")
