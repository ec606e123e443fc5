"""Documents from outside, changed at random: refused or a named condition, never an exception in a pass."""

from __future__ import annotations

import copy
import functools
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from flow_reports import log_of, report_of
from flow_world import World, node, spec_of
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from property_tests import examples
from pydantic import ValidationError

from trainwright.worker_api import REPORT_MARKER, WorkerTask
from trainwright_operator.api.spec import Replan, TrainingPlanSpec
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.reasons import Reason

FUZZ = examples(2000, quick=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
PASSES = 12
"""Passes after a change: each phase that reads it has run by then."""
MAX_ATTEMPTS = 2
"""The most creations of a ConfigMap or job in these passes: what cannot be used is measured again once."""
REASONS = frozenset(Reason)
EXTREMES: tuple[Any, ...] = (
    -1, 0, 1, 2**31, 2**63, 2**64, 10**400, -0.0, 1e-300, 1e308, float("nan"), float("inf"), "", "x", "\ud800", "9" * 5000,
    None, True, [], {}, [[]], {"": 0}, "2026-13-45T99:99:99Z",
)  # fmt: skip


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """Return the document with one to three of its values replaced, removed or repeated."""
    found = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        place, key = found, None
        while isinstance(place, dict | list) and place and (key is None or draw(st.integers(0, 3)) > 0):
            if key is not None and not isinstance(place[key], dict | list):
                break
            place = place if key is None else place[key]
            if not place:
                break
            key = draw(st.sampled_from(sorted(place)) if isinstance(place, dict) else st.integers(0, len(place) - 1))
        if key is None or not place:
            return copy.deepcopy(draw(st.sampled_from(EXTREMES)))
        what = draw(st.sampled_from(["replace", "replace", "remove", "repeat"]))
        if what == "remove":
            del place[key]
        elif what == "repeat" and isinstance(place, list):
            place.append(copy.deepcopy(place[key]))
        else:
            place[key] = copy.deepcopy(draw(st.sampled_from(EXTREMES)))
    return found


def small() -> World:
    spec = spec_of(search={"planner": "Megatron", "limits": {"maxTensorDegree": 1}}, trials={"topK": 1, "perGang": 2})
    return World(spec=spec, nodes=(node("n1"), node("n2", devices=1)))


@functools.cache
def worlds() -> tuple[World, ...]:
    """Return a world as of each time at which something more was stored."""
    world = small()
    found = []
    while world.succeeded == "Unknown":
        before = len(world.stored)
        world.step()
        if len(world.stored) != before:
            found.append(copy.deepcopy(world))
    return (*found, copy.deepcopy(world))


def go_on(world: World) -> None:
    """Run passes. Then the plan goes on, waits for a reason or has ended for one; nothing of an ended plan runs."""
    world.created.clear()
    for _ in range(PASSES):
        done = world.step()
    status = world.status
    json.dumps(status.dump(), allow_nan=False).encode()  # the API server takes it
    assert status.conditions
    assert all(one.reason in REASONS and one.message.strip() for one in status.conditions)
    assert all(one.reason is None or one.reason in REASONS for one in status.trials)
    assert max(Counter(world.created).values(), default=0) <= MAX_ATTEMPTS, "it repeats what it did"
    live = {one.gang for one in world.jobs.values()} | {
        one.gang for one in world.stored.values() if one.role == StoredRole.TASK
    }
    if world.succeeded != "Unknown":
        assert not live
    elif status.waiting is not None and status.waiting.since is not None:
        assert status.waiting.reason in REASONS
        assert status.waiting.reason == world.condition("Succeeded").reason
    elif status.phase != "Suspended":
        assert live or done, "it stands still"


@FUZZ
@given(st.data())
def test_changed_config_map_never_breaks_a_pass(data: st.DataObject) -> None:
    world = copy.deepcopy(data.draw(st.sampled_from(worlds()), "world"))
    world.spec = world.spec.model_copy(update={"replan": data.draw(st.sampled_from(Replan), "replan")})
    name = data.draw(st.sampled_from(sorted(world.stored)), "ConfigMap")
    stored = world.stored[name]
    key = data.draw(st.sampled_from(sorted(stored.data)), "key")
    try:
        document = json.loads(stored.data[key])
    except ValueError:
        document = stored.data[key]
    text = json.dumps(data.draw(changed(document), "document"))
    annotations = {
        one: data.draw(st.sampled_from(["", "never", value]), one) for one, value in stored.annotations.items()
    }
    world.stored[name] = replace(stored, data={**stored.data, key: text}, annotations=annotations)
    world.restart()
    go_on(world)


@FUZZ
@given(st.data())
def test_changed_report_never_breaks_a_pass(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["links", "profile", "trial", "series"]), "task")
    seen: list[str] = []

    def log(task: WorkerTask) -> str | None:
        if (
            not type(task)
            .__name__.lower()
            .startswith({"profile": "profiling", "series": "trialseries"}.get(kind, kind))
        ):
            return None
        lines = log_of(report_of(task)).splitlines()
        if not seen:
            seen.append(json.dumps(data.draw(changed(json.loads(lines[-1].removeprefix(REPORT_MARKER))), "report")))
        return "\n".join((*lines[:-1], f"{REPORT_MARKER} {seen[0]}", ""))

    world = small()
    world.log = log
    for _ in range(80):
        world.step()
        if world.succeeded != "Unknown":
            break
    go_on(world)


@FUZZ
@given(st.data())
def test_changed_spec_is_refused_or_never_breaks_a_pass(data: st.DataObject) -> None:
    body = json.loads(small().spec.model_dump_json(by_alias=True, exclude_none=True))
    try:
        spec = TrainingPlanSpec.model_validate(data.draw(changed(body), "spec"))
    except ValidationError:
        return
    world = small()
    world.spec = spec
    for _ in range(25):
        world.step()
    go_on(world)


@pytest.mark.parametrize("part", ["trials", "covariance", "memory_shares", "node"])
def test_changed_candidates_end_the_plan_with_a_sentence(part: str) -> None:
    world = small()
    trials = {"topK": 2, "baseline": "None", "stopWhenRegretBelow": 0.01}
    world.change(search={"planner": "Megatron", "limits": {"maxTensorDegree": 1}}, trials=trials)
    world.run(until=lambda: bool(world.status.trials))
    stored = world.stored[world.status.candidates_ref.config_map]
    document = json.loads(stored.data["document.json"])
    if part == "trials":
        document["trials"] = []
    elif part == "node":
        document = json.loads(json.dumps(document).replace('"n1"', '"n9"'))
    else:
        del document["uncertainty"][part][0]
    world.stored[stored.name] = replace(stored, data={"document.json": json.dumps(document)})
    world.run()
    assert world.condition("Succeeded").reason == "StoredDocumentInvalid"
    assert stored.name in world.condition("Succeeded").message
