"""Plans that a newer version of the operator left: after a rollback they wait, lose nothing, and go on after the next upgrade."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import kopf
import pytest
from flow_harm import running
from flow_reports import log_of, report_of
from flow_world import World, spec_of

from trainwright.worker_api import REPORT_MARKER, ProfilingTask
from trainwright_operator import plan_resource
from trainwright_operator.flow import actions as a
from trainwright_operator.flow.decide import IDLE_REQUEUE_SECONDS, requeue_after_seconds
from trainwright_operator.flow.snapshot import PlanFacts
from trainwright_operator.kube.object_cache import WatchEvent
from trainwright_operator.kube.watch import event_handler

PASSES = 8
REASON = "NeedsNewerVersion"
META = {"name": "p", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
SPEC: dict[str, Any] = json.loads(spec_of().model_dump_json(by_alias=True, exclude_none=True))


def small() -> World:
    return World(spec=spec_of(search={"planner": "Megatron", "limits": {"maxTensorDegree": 1}}, trials={"topK": 1}))


def owned(world: World) -> tuple[set[str], set[str]]:
    return set(world.jobs), set(world.stored)


def waits(world: World) -> bool:
    return [world.condition(kind).reason for kind in ("Accepted", "Succeeded")] == [REASON, REASON]


@pytest.mark.parametrize("gang", ["links", "profile-1", "candidate-1"])
def test_plan_with_an_unreadable_spec_keeps_its_pods_and_goes_on_when_it_is_readable(gang: str) -> None:
    world = small()
    world.run(until=lambda: running(world, gang))
    before, trials = owned(world), world.status.trials
    world.spec_error = "spec.trials.futureFlag: Extra inputs are not permitted"
    world.restart()
    for _ in range(PASSES):
        assert not any(isinstance(done, a.DeleteJob | a.DeleteConfigMap) for done in world.step())
    assert waits(world)
    assert "futureFlag" in world.condition("Accepted").message
    assert owned(world) == before
    assert world.status.trials == trials
    assert [event.type for event in world.events if event.reason == REASON] == ["Warning"]
    world.spec_error = ""
    world.run()
    assert world.succeeded == "True"
    assert len(world.created) == len(set(world.created)), "something was measured twice"


def test_answer_stays_when_the_spec_is_of_a_newer_version() -> None:
    world = small()
    world.spec = spec_of(ttlSecondsAfterFinished=0)
    world.run(until=lambda: world.succeeded == "True")
    world.spec_error = "spec.futureLimit: Extra inputs are not permitted"
    world.deleted = False
    for _ in range(PASSES):
        assert world.step() == []


def with_unknown_field(document: dict[str, Any]) -> None:
    document["future"] = 1


def with_unknown_kind(document: dict[str, Any]) -> None:
    document["document"] = "FutureDocument"


def with_unknown_version(document: dict[str, Any]) -> None:
    document["apiVersion"] = "trainwright.dev/v2"


@functools.cache
def worlds() -> tuple[World, ...]:
    """Return a world as of each time at which something more was stored."""
    world, found = small(), []
    while world.succeeded == "Unknown":
        before = len(world.stored)
        world.step()
        if len(world.stored) > before:
            found.append(copy.deepcopy(world))
    return tuple(found)


@pytest.mark.parametrize("change", [with_unknown_field, with_unknown_kind, with_unknown_version])
def test_plan_with_a_stored_document_of_a_newer_version_waits_and_goes_on(
    change: Callable[[dict[str, Any]], None],
) -> None:
    held = 0
    for number, before in enumerate(worlds()[::2]):
        for name, stored in before.stored.items():
            for key in (key for key in stored.data if key.endswith(".json")):
                world = copy.deepcopy(before)
                document = json.loads(stored.data[key])
                change(document)
                world.stored[name] = replace(stored, data={**stored.data, key: json.dumps(document)})
                world.restart()
                kept = None
                for _ in range(PASSES):
                    world.step()
                    kept = kept or (owned(world) if waits(world) else None)
                assert kept in (None, owned(world)), (number, name, key)
                assert world.succeeded != "False", (number, name, key)
                held += kept is not None
                if name in world.stored:
                    world.stored[name] = replace(world.stored[name], data=stored.data)
                if number % 5 == 4:
                    world.run()
                    assert world.succeeded == "True"
    assert held > 10


def log_of_newer_worker(order: object) -> str | None:
    if not isinstance(order, ProfilingTask):
        return None
    *head, last = log_of(report_of(order)).splitlines()
    document = json.loads(last.removeprefix(REPORT_MARKER)) | {"future": 1}
    return "\n".join((*head, f"{REPORT_MARKER} {json.dumps(document)}", ""))


@pytest.mark.parametrize("newer", ["report", "task"])
def test_wait_for_a_newer_version_ends_at_the_wait_deadline(newer: str) -> None:
    limits = {"search": {"planner": "Megatron", "limits": {"maxTensorDegree": 1}}, "trials": {"topK": 1}}
    world = World(spec=spec_of(**limits, waitDeadlineSeconds=900))
    if newer == "report":
        world.log = log_of_newer_worker
    else:
        world.run(until=lambda: running(world, "profile-1"))
        (stored,) = [one for one in world.stored.values() if one.gang == "profile-1" and "order.json" in one.data]
        task = json.loads(stored.data["order.json"]) | {"future": 1}
        world.stored[stored.name] = replace(stored, data={**stored.data, "order.json": json.dumps(task)})
    world.run(until=lambda: waits(world))
    began = world.now
    world.run()
    found = world.condition("Succeeded")
    assert (found.status, found.reason) == ("False", "WaitDeadlineExceeded")
    assert "NeedsNewerVersion: " in found.message
    assert 900 <= (world.now - began).total_seconds() < 1100
    world.step()
    assert world.jobs == {}


def test_report_of_a_newer_worker_waits_with_its_pod() -> None:
    world = small()
    world.log = log_of_newer_worker
    world.run(until=lambda: world.condition("Accepted").reason == REASON)
    jobs = set(world.jobs)
    for _ in range(PASSES):
        world.step()
    assert waits(world)
    assert set(world.jobs) == jobs != set()


def test_gang_of_an_unknown_phase_is_not_deleted() -> None:
    world = small()
    world.run(until=lambda: running(world, "candidate-1"))
    name, stored = next((name, one) for name, one in world.stored.items() if one.gang == "candidate-1")
    future = name.replace("candidate-1", "verify-1")
    data = {"order.json": json.dumps(json.loads(stored.data["order.json"]) | {"document": "VerifyOrder"})}
    world.stored[future] = replace(stored, name=future, gang="verify-1", data=data)
    (job,) = [job for job in world.jobs.values() if job.gang == "candidate-1"]
    future_job = job.name.replace("candidate-1", "verify-1")
    world.jobs[future_job] = replace(job, name=future_job, gang="verify-1")
    for _ in range(PASSES):
        world.step()
    assert waits(world)
    assert future in world.stored
    assert future_job in world.jobs


def test_suspension_frees_devices_though_a_task_is_of_a_newer_version() -> None:
    world = small()
    world.run(until=lambda: running(world, "candidate-1"))
    name, stored = next((name, one) for name, one in world.stored.items() if one.gang == "candidate-1")
    task = json.loads(stored.data["order.json"]) | {"future": 1}
    world.stored[name] = replace(stored, data={**stored.data, "order.json": json.dumps(task)})
    world.change(search={"planner": "Megatron", "limits": {"maxTensorDegree": 1}}, trials={"topK": 1}, suspend=True)
    world.step()
    assert world.jobs == {}


def test_plan_with_hidden_fields_is_not_written() -> None:
    world = small()
    world.run(until=lambda: running(world, "links"))
    world.hidden_fields = ("spec.futureLimit",)
    (warning,) = world.decide()
    assert isinstance(warning, a.EmitEvent)
    assert (warning.type, warning.reason) == ("Warning", REASON)
    assert "spec.futureLimit" in warning.message
    assert requeue_after_seconds(world.snapshot(), world.now) == IDLE_REQUEUE_SECONDS
    world.hidden_fields = ()
    world.run()
    assert world.succeeded == "True"


def managed(fields: dict[str, Any], **entry: str) -> dict[str, Any]:
    return {**META, "managedFields": [{"operation": "Update", "fieldsV1": fields, **entry}]}


def test_fields_that_the_definition_hides_are_found_among_the_managed_ones() -> None:
    fields = {"f:spec": {".": {}, "f:future": {}, "f:trials": {"f:topK": {}, "f:flag": {}},
                         "f:worker": {"f:podTemplate": {"f:spec": {"f:anything": {}}}}, "f:priority": {}}}  # fmt: skip
    found = plan_resource.plan_facts({"metadata": managed(fields), "spec": SPEC}, "image")
    assert found.hidden_fields == ("spec.future", "spec.trials.flag")
    shown = plan_resource.plan_facts({"metadata": managed(fields), "spec": {**SPEC, "future": 1}}, "image")
    assert shown.hidden_fields == ("spec.trials.flag",)
    assert shown.spec_error.startswith("spec.future: ")
    status = plan_resource.plan_facts({"metadata": managed(fields, subresource="status"), "spec": SPEC}, "image")
    assert status.hidden_fields == ()


def test_fields_that_the_definition_hides_are_found_by_the_watch() -> None:
    seen: list[WatchEvent] = []
    handler = event_handler(seen.append, lambda body: plan_resource.plan_facts(body, "image"))
    plan = {"metadata": managed({"f:spec": {"f:future": {}}}), "spec": SPEC}
    asyncio.run(handler(body=kopf.Body(plan), event={"object": plan}, type=None))
    (event,) = seen
    assert isinstance(event.facts, PlanFacts)
    assert event.facts.hidden_fields == ("spec.future",)
    assert "managedFields" not in plan["metadata"]  # kopf keeps the object


def test_status_of_a_newer_version_is_kept_as_far_as_it_can_be_read() -> None:
    def condition(kind: str) -> dict[str, Any]:
        return {"type": kind, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z", "reason": "Yes"}

    status = {
        "phase": "Verifying",
        "future": {"x": 1},
        "conditions": [condition("Verified"), condition("Succeeded") | {"futureWord": 2}],
        "winner": {"summary": "pp1", "predictedRank": 1, "predictedSeconds": 1.0, "plan": {}},
    }
    found = plan_resource.plan_facts({"metadata": META, "spec": SPEC, "status": status}, "image").status
    assert [one.type for one in found.conditions] == ["Succeeded"]
    assert found.phase is None
    assert found.winner is not None
    kept = found.dump()
    assert kept["future"] == {"x": 1}
    assert kept["conditions"][0]["futureWord"] == 2
