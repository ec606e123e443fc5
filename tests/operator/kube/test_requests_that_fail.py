"""Errors of the API server: they appear in the status until they end."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from flow_world import World, spec_of

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
from trainwright_operator.flow.snapshot import DryRun
from trainwright_operator.kube.apply import Applier
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.object_cache import ObjectCache
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


def test_failed_plan_leaves_no_open_trial() -> None:
    world = World(spec=spec_of(waitDeadlineSeconds=600))
    world.run(until=lambda: bool(world.status.trials) and world.trial("candidate-1").state == "Running")
    world.run_seconds = 1e6
    world.fails = {CreateConfigMap: WEBHOOK}
    world.run()
    assert world.condition("Succeeded").reason == "WaitDeadlineExceeded"
    assert {(trial.state, trial.reason) for trial in world.status.trials} == {("Skipped", "WaitDeadlineExceeded")}
    assert {trial.start_time for trial in world.status.trials} == {None}
    assert WEBHOOK in world.condition("Succeeded").message


class Refusing:
    """API server that accepts only status patches."""

    def __init__(self) -> None:
        self.statuses = 0

    async def create(self, path: str, body: dict[str, Any], **query: str) -> Any:
        raise ApiError(500, f"no {body['kind']} today")

    async def delete(self, path: str, uid: str = "") -> None:
        raise AssertionError("nothing else is done after a failure")

    async def patch(self, path: str, body: Any, content_type: str) -> Any:
        assert path.endswith("/status")
        self.statuses += 1
        return {"metadata": {"resourceVersion": "1"}, "status": body[-1]["value"]}


QUOTA = "exceeded quota: count/pytorchjobs"
POLICY = (
    "pytorchjobs \"dry-run\" is forbidden: ValidatingAdmissionPolicy 'images' with binding 'all' denied request: no"
)
DENIAL = 'admission webhook "images.example" denied the request: no'
SIDE_EFFECTS = 'admission webhook "images.example" does not support dry run'
INVALID = "spec.pytorchReplicaSpecs.Master.template.spec.containers: Required value"


@pytest.mark.parametrize(
    ("status", "words", "reason"),
    [
        (403, QUOTA, "JobRefused"),
        (422, POLICY, "JobRefused"),
        (400, DENIAL, "JobRefused"),
        (400, SIDE_EFFECTS, "JobRefused"),
        (413, DENIAL, "JobRefused"),
        (404, "not found", "PyTorchJobCRDMissing"),
        (422, INVALID, "PodTemplateInvalid"),
        (400, 'unknown field "spec.a"', "PodTemplateInvalid"),
    ],
)
def test_dry_run_tells_what_is_refused_from_what_is_invalid(status: int, words: str, reason: str) -> None:
    class Answering(Refusing):
        async def create(self, path: str, body: dict[str, Any], **query: str) -> Any:
            raise ApiError(status, words)

    memory = ReadCache()
    applier = Applier(cast(Api, Answering()), SearchPool(), ObjectCache())
    asyncio.run(applier.apply(World().snapshot(), [DryRunJob("key", {"kind": "PyTorchJob"})], memory)).check()
    assert memory.dry_run == DryRun("key", reason, words)


def test_status_is_written_when_an_earlier_action_fails() -> None:
    api, memory = Refusing(), ReadCache()
    applier = Applier(cast(Api, api), SearchPool(), ObjectCache())
    todo: list[Action] = [
        CreateConfigMap("order", StoredRole.TASK, {}),
        DeleteConfigMap("other"),
        SetStatus(TrainingPlanStatus()),
    ]
    snapshot = World().snapshot()

    since = []
    for number in (1, 2):
        with pytest.raises(ApiError, match="no ConfigMap today"):
            asyncio.run(applier.apply(snapshot, todo, memory)).check()
        assert api.statuses == number
        assert memory.failing is not None
        assert memory.failing.message == "no ConfigMap today"
        since.append(memory.failing.since)
    assert since[0] == since[1]
    asyncio.run(applier.apply(snapshot, todo[2:], memory)).check()
    assert memory.failing is None


class Accepting(Refusing):
    async def create(self, path: str, body: dict[str, Any], **query: str) -> Any:
        return {}


@pytest.mark.parametrize("first", [0, 1])
def test_status_is_written_where_passes_alternate_that_have_one_and_that_have_none(first: int) -> None:
    api, memory = Accepting(), ReadCache()
    applier = Applier(cast(Api, api), SearchPool(), ObjectCache())
    template, job = (DryRunJob(key, {"kind": "PyTorchJob"}) for key in ("template", "job"))
    for number in range(first, first + 8):
        todo = [job, SetStatus(TrainingPlanStatus())] if number % 2 else [template]
        asyncio.run(applier.apply(World().snapshot(), todo, memory)).check()
    assert api.statuses


def test_a_few_passes_that_change_something_leave_the_status_to_the_next_one() -> None:
    api, memory = Accepting(), ReadCache()
    applier = Applier(cast(Api, api), SearchPool(), ObjectCache())
    changing = [DryRunJob("key", {"kind": "PyTorchJob"}), SetStatus(TrainingPlanStatus())]
    written = []
    for todo in [*[changing] * 5, changing[1:], *[changing] * 2]:
        asyncio.run(applier.apply(World().snapshot(), todo, memory)).check()
        written.append(api.statuses)
    assert written == [0, 0, 0, 1, 1, 2, 2, 2]
