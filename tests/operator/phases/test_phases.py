"""Results of phases: what earlier ones changed stands when a later one fails."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from flow_world import World

from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import WaitingStatus
from trainwright_operator.flow.actions import CreateConfigMap, EmitEvent, SetStatus
from trainwright_operator.flow.decide import decide
from trainwright_operator.flow.phase import Findings, ReconcileContext
from trainwright_operator.flow.phases.sequence import PHASES
from trainwright_operator.flow.snapshot import PlannerState, RequestFailure, Snapshot


def planning() -> tuple[World, Snapshot]:
    """Return a world that searches, and its state as if the cluster document had not been stored yet."""
    world = World(search_hangs=True)
    world.run(until=lambda: world.planner.state is PlannerState.RUNNING)
    found = world.snapshot()
    stored = tuple(one for one in found.stored if not one.name.endswith("-cluster"))
    status = found.plan.status.model_copy(update={"cluster_ref": None})
    return world, replace(found, stored=stored, plan=replace(found.plan, status=status))


def test_cluster_is_stored_and_referenced_when_the_search_fails() -> None:
    world, snapshot = planning()
    failed = replace(snapshot.planner, state=PlannerState.FAILED, message="broke down")
    actions = decide(replace(snapshot, planner=failed), world.now)
    cluster = next(one.name for one in actions if isinstance(one, CreateConfigMap))
    status = next(one.status for one in actions if isinstance(one, SetStatus))
    assert status.cluster_ref is not None
    assert status.cluster_ref.config_map == cluster
    states = {one.type.value: (one.status, one.reason) for one in status.conditions}
    assert states["Planned"] == states["Succeeded"] == ("False", "PlannerFailed")
    assert states["Profiled"][0] == "True"


@pytest.mark.parametrize(("seconds", "state"), [(599, "Unknown"), (601, "False")])
def test_no_actions_remain_when_requests_fail_beyond_the_wait_deadline(seconds: float, state: str) -> None:
    world, snapshot = planning()
    since = world.now - timedelta(seconds=seconds)
    status = snapshot.plan.status.model_copy(update={"waiting": WaitingStatus(reason="RequestFailed", since=since)})
    spec = world.spec.model_copy(update={"wait_deadline_seconds": 600})
    plan = replace(snapshot.plan, spec=spec, status=status)
    actions = decide(replace(snapshot, plan=plan, failing=RequestFailure("quota", since)), world.now)
    status = next(one.status for one in actions if isinstance(one, SetStatus))
    planned = next(one for one in status.conditions if one.type is ConditionType.PLANNED)
    assert (planned.status, planned.reason) == (
        state, "RequestFailed" if state == "Unknown" else "WaitDeadlineExceeded"
    )  # fmt: skip
    assert status.cluster_ref is not None
    assert all(isinstance(one, SetStatus | EmitEvent) for one in actions) == (state == "False")


def test_phases_return_equal_results_when_called_twice() -> None:
    world, snapshot = planning()
    context = ReconcileContext(snapshot, world.now)
    findings = Findings()
    for advance in (advance for phase in PHASES[:4] for advance in phase.advances):
        results = [advance(context, findings) for _ in range(2)]
        assert results[0] == results[1]
        findings = results[0].findings
    assert all(profiles.layers for _, profiles in findings.profiles)
