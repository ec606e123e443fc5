"""Plans that the operator cannot read, on a real API server: of a newer version, and nested too deeply."""

from __future__ import annotations

import copy
import json
from typing import Any

from operator_process import operator, until

from trainwright_operator.api import crd

FUTURE = {"type": "integer"}


NESTED_LEVELS = 1_200
"""More than Python's json reads by itself; the server takes minutes for 10,000, its own limit."""


def newer_definition() -> dict[str, Any]:
    """Return the definition of a version that has another field in spec and in spec.trials."""
    definition = copy.deepcopy(crd.crd_manifest())
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    spec["futureLimit"] = FUTURE
    spec["trials"]["properties"]["futureLimit"] = FUTURE
    return definition


def install(api: Any, definition: dict[str, Any]) -> None:
    api.kubectl("apply", "--server-side", "--force-conflicts", document=definition)
    api.establish("crd/trainingplans.trainwright.dev")


def test_rolled_back_plan_waits_and_loses_no_field(bare_api_server, training_plan_of, tmp_path) -> None:
    api = bare_api_server
    install(api, newer_definition())
    api.create(training_plan_of("default", "newer", {"futureLimit": 5, "trials.futureLimit": 7}))
    api.create(training_plan_of("default", "plain"))

    def plan() -> dict[str, Any]:
        found: dict[str, Any] = api.get("trainingplan", "newer", "--namespace", "default")
        return found

    def reasons() -> set[str]:
        return {event["reason"] for event in api.get("events", "--namespace", "default")["items"]}

    def accepted(name: str) -> dict[str, Any]:
        status = api.get("trainingplan", name, "--namespace", "default").get("status", {})
        return next((one for one in status.get("conditions", []) if one["type"] == "Accepted"), {})

    # Rolled back before its definition: the field is shown, but not known.
    with operator(api, "default", tmp_path) as (process, _, log):
        until("the plan to wait", 40, lambda: accepted("newer").get("reason") == "NeedsNewerVersion")
        assert "futureLimit" in accepted("newer")["message"]
        until("the other plan to be worked on", 20, lambda: accepted("plain").get("message"))
        process.terminate()  # releases the lease
        assert process.wait(timeout=20) == 0, log.read_text()
    install(api, crd.crd_manifest())
    until("the field to be hidden", 20, lambda: "futureLimit" not in plan()["spec"])
    before, known = plan()["metadata"]["resourceVersion"], len(api.get("events")["items"])
    with operator(api, "default", tmp_path):
        until("another warning", 40, lambda: len(api.get("events")["items"]) > known)
    assert "NeedsNewerVersion" in reasons()
    assert plan()["metadata"]["resourceVersion"] == before
    install(api, newer_definition())
    until("the field to be shown again", 20, lambda: plan()["spec"].get("futureLimit") == 5)
    assert plan()["spec"]["trials"]["futureLimit"] == 7


def test_plan_that_nests_deeply_stops_no_other_plan(bare_api_server, training_plan_of, tmp_path) -> None:
    api = bare_api_server
    install(api, crd.crd_manifest())
    deep = training_plan_of("default", "deep")
    deep["spec"]["worker"] = {"podTemplate": {"spec": {"nested": "INNER"}}}
    nested = '{"a":' * NESTED_LEVELS + "1" + "}" * NESTED_LEVELS
    api.kubectl("create", "--filename", "-", piped=json.dumps(deep).replace('"INNER"', nested))
    api.create(training_plan_of("default", "plain"))

    def accepted(name: str) -> str:
        path = 'jsonpath={.status.conditions[?(@.type=="Accepted")].message}'
        found: str = api.kubectl("get", "trainingplan", name, "--namespace", "default", "--output", path)
        return found

    with operator(api, "default", tmp_path) as (process, _, log):
        until("the other plan to be worked on", 40, lambda: accepted("plain"))
        until("the deep plan to be told", 20, lambda: accepted("deep"))
        assert process.poll() is None, log.read_text()
    assert "spec.worker.podTemplate.spec: " in accepted("deep")
    assert "nests more than 64 levels" in accepted("deep")
