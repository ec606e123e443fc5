"""Errors of the API server: they appear in the status and end in a named reason within their deadline."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, cast

import pytest
from flow_world import START, World, spec_of

from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.actions import (
    Action,
    CreateConfigMap,
    CreateJob,
    DeleteConfigMap,
    DryRunJob,
    SetStatus,
    StoredRole,
)
from trainwright_operator.kube.apply import Applier
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.search_pool import SearchPool
from trainwright_operator.kube.snapshot_reader import ReadCache

WEBHOOK = 'failed calling webhook "validator.pytorchjob": connection refused'


@pytest.mark.parametrize(
    ("action", "condition"),
    [(DryRunJob, "Accepted"), (CreateConfigMap, "NodesDiscovered"), (CreateJob, "LinksMeasured")],
)
def test_failing_request_is_reported_until_it_succeeds(action: type, condition: str) -> None:
    world = World(fails={action: WEBHOOK})
    for _ in range(8):
        world.step()
    told = world.condition(condition)
    assert (told.status, told.reason) == ("Unknown", "RequestFailed")
    assert WEBHOOK in told.message
    world.fails.clear()
    world.run()
    assert world.succeeded == "True"
    assert "webhook" not in world.condition(condition).message


@pytest.mark.parametrize(("action", "condition"), [(DryRunJob, "Accepted"), (CreateConfigMap, "NodesDiscovered")])
def test_plan_fails_when_requests_keep_failing(action: type, condition: str) -> None:
    world = World(fails={action: WEBHOOK})
    world.run()
    assert (world.condition(condition).reason, world.succeeded) == ("RequestFailed", "False")
    assert WEBHOOK in world.condition("Succeeded").message
    assert world.now - START < timedelta(seconds=620)


def test_failed_plan_leaves_no_open_trial() -> None:
    world = World()
    world.run(until=lambda: bool(world.status.trials) and world.trial("candidate-1").state == "Succeeded")
    world.fails = {CreateConfigMap: WEBHOOK}
    world.run()
    assert world.condition("Succeeded").reason == "RequestFailed"
    first, *others = world.status.trials
    assert first.state == "Succeeded"
    assert {(trial.state, trial.reason) for trial in others} == {("Skipped", "RequestFailed")}
    assert {trial.start_time for trial in others} == {None}
    assert all(WEBHOOK in trial.message for trial in others)
    assert others[0].message.startswith("cut short: ")
    assert others[-1].message.startswith("not started: ")


def test_gang_times_out_when_its_job_cannot_be_created() -> None:
    world = World(fails={CreateJob: WEBHOOK}, spec=spec_of(links={"deadlineSeconds": 60}))
    world.run()
    assert world.condition("LinksMeasured").reason == "PodsNotCreated"
    assert WEBHOOK in world.condition("Succeeded").message
    assert world.now - START < timedelta(seconds=90)


def test_resolved_request_failure_does_not_count() -> None:
    world = World(fails={CreateConfigMap: WEBHOOK})
    world.run(until=lambda: world.failing is not None)
    world.pass_time(400)
    world.fails.clear()
    world.step()
    world.fails = {CreateConfigMap: WEBHOOK}
    world.step()
    assert world.failing is not None
    world.pass_time(400)
    world.step()
    assert world.succeeded == "Unknown"
    world.fails.clear()
    world.run()
    assert world.succeeded == "True"


class Refusing:
    """API server that accepts only status patches."""

    def __init__(self) -> None:
        self.statuses = 0

    async def create(self, path: str, body: dict[str, Any], **query: str) -> Any:
        raise ApiError(500, f"no {body['kind']} today")

    async def delete(self, path: str) -> None:
        raise AssertionError("nothing else is done after a failure")

    async def patch(self, path: str, body: Any, content_type: str) -> Any:
        assert path.endswith("/status")
        self.statuses += 1


def test_status_is_written_when_an_earlier_action_fails() -> None:
    api, memory = Refusing(), ReadCache()
    applier = Applier(cast(Api, api), SearchPool())
    todo: list[Action] = [
        CreateConfigMap("order", StoredRole.TASK, {}),
        DeleteConfigMap("other"),
        SetStatus(TrainingPlanStatus()),
    ]
    plan = World().snapshot().plan

    since = []
    for number in (1, 2):
        with pytest.raises(ApiError, match="no ConfigMap today"):
            asyncio.run(applier.apply(plan, todo, memory))
        assert api.statuses == number
        assert memory.failing is not None
        assert memory.failing.message == "no ConfigMap today"
        since.append(memory.failing.since)
    assert since[0] == since[1]
    asyncio.run(applier.apply(plan, todo[2:], memory))
    assert memory.failing is None
