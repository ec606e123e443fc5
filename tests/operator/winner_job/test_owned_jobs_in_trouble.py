"""Jobs of plans where rules change, the operator is killed, or the API server refuses: still one, and still the plan's."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest
from flow_api import MemoryApi
from flow_handover import JOB, RUN, record_of
from flow_harm import pass_with_kills, running
from flow_owned_jobs import HOUR, end_job, holding, records, rules, settle, world_of
from flow_world import RESOURCE, START

from trainwright_operator.api.installation import HandoverRule
from trainwright_operator.flow import actions as a
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.decide import requeue_after_seconds
from trainwright_operator.flow.names import (
    HANDED_OVER_ANNOTATION,
    HANDED_OVER_LABEL,
    OWNED_ANNOTATION,
)
from trainwright_operator.kube import apply
from trainwright_operator.kube.client import ApiError
from trainwright_operator.kube.object_cache import ObjectCache
from trainwright_operator.kube.snapshot_reader import ReadCache, SnapshotReader
from trainwright_operator.settings import Settings


@pytest.mark.parametrize("rule", HandoverRule)
def test_job_of_the_users_stays_whatever_the_rule_becomes(rule: HandoverRule) -> None:
    world = holding(HandoverRule.FREE, ttlSecondsAfterFinished=None)
    before, job = copy.deepcopy(world.handed_over), world.status.job
    world.rules = rules(rule, 1.0 if rule is HandoverRule.OWNED else None)
    for edit in ({}, {"priority": 1}, {"suspend": True}, {"apply": "Never"}):
        world.change(**(RUN | edit))
        world.pass_time(5 * HOUR)
        settle(world)
        assert (world.handed_over, world.status.job, world.status.held_job) == (before, job, None)


@pytest.mark.parametrize("rule", [HandoverRule.FREE, HandoverRule.NEVER])
def test_job_of_the_plan_stays_its_own_whatever_the_rule_becomes(rule: HandoverRule) -> None:
    world = holding()
    world.rules = rules(rule)
    world.change(**(RUN | {"priority": 1}))
    world.run()
    settle(world)
    assert world.status.held_job is not None
    world.change(**(RUN | {"apply": "Never"}))
    world.run()
    assert not world.handed_over


@pytest.mark.parametrize("before", [HandoverRule.FREE, HandoverRule.OWNED])
@pytest.mark.parametrize("after", HandoverRule)
def test_rule_that_changes_before_anything_is_created_holds(before: HandoverRule, after: HandoverRule) -> None:
    world = world_of(before)
    record_of(world)
    assert not world.handed_over
    world.rules = rules(after)
    world.run()
    settle(world, 3)
    owned = {"ownerReferences" in one["metadata"] for one in world.handed_over.values()}
    assert owned == (set() if after is HandoverRule.NEVER else {after is HandoverRule.OWNED})
    assert (world.status.held_job is not None) == (after is HandoverRule.OWNED)
    if after is HandoverRule.NEVER:
        assert world.status.job is None
        assert not records(world)


@pytest.mark.parametrize("after", [HandoverRule.OWNED, HandoverRule.NEVER])
def test_job_of_which_a_part_was_created_is_completed_as_it_was_decided(after: HandoverRule) -> None:
    world = world_of(HandoverRule.FREE)
    record_of(world)
    world.apply([one for one in world.decide() if isinstance(one, a.HandOverJob)][:1])
    world.restart()
    world.rules = rules(after)
    world.run()
    settle(world)
    assert len(world.handed_over) == 2
    assert not any("ownerReferences" in one["metadata"] for one in world.handed_over.values())
    assert world.status.held_job is None


def test_installation_that_hands_over_no_jobs_says_so_and_measures() -> None:
    world = world_of(HandoverRule.NEVER)
    words = "this installation hands over no jobs (handover.allow: Never of the chart)"
    world.run(until=lambda: running(world, "candidate-1"))
    accepted = world.condition("Accepted")
    assert (accepted.status, words in accepted.message) == ("True", True)
    world.run()
    assert world.succeeded == "True"
    assert world.status.winner is not None
    assert world.condition("Succeeded").message.endswith(f"; no job of it is created: {words}")
    assert not world.handed_over
    assert not records(world)
    assert world.status.job is None
    unasked = world_of(HandoverRule.NEVER, apply="Never")
    unasked.run()
    assert words not in unasked.condition("Accepted").message + unasked.condition("Succeeded").message


@pytest.mark.usefixtures("each_launcher")
def test_operator_that_is_killed_before_any_action_makes_and_ends_one_job() -> None:
    undisturbed = world_of()
    undisturbed.run()
    world = world_of()
    world.run(until=lambda: running(world, "candidate-1"))
    boundaries = 0
    for edit in (None, {"apply": "Never"}, {}):
        if edit is not None:
            world.change(**(RUN | edit))
        while world.succeeded == "Unknown" or world.status.observed_generation != world.generation:
            todo = world.decide()
            for number in range(len(todo)):
                killed = copy.deepcopy(world)
                killed.apply(todo[:number])
                killed.restart()
                killed.run()
                settle(killed, 3)
                wanted = {} if edit == {"apply": "Never"} else undisturbed.handed_over
                assert killed.handed_over == wanted
                assert (killed.status.held_job is not None) == bool(wanted)
                boundaries += 1
            world.apply(todo)
            world.pass_time(2.0)
    assert boundaries >= 10


@pytest.mark.parametrize("seed", range(12))
def test_edits_and_kills_in_any_order_leave_what_was_asked_for_last(seed: int) -> None:
    rng = random.Random(seed)
    world = holding()
    for _ in range(6):
        edit = rng.choice(({}, {"apply": "Never"}, {"suspend": True}, {"apply": "Suspended"}, {"job": JOB}))
        world.change(**(RUN | edit))
        pass_with_kills(world, rng, likely=0.4, passes=rng.randrange(8))
        if rng.random() < 0.2:
            for name in list(world.winner_jobs):
                world.delete_winner_job(name)
    world.change(**(RUN | {"apply": "Never"}))
    world.run()
    settle(world, 3)
    assert not world.handed_over
    assert not records(world)
    world.change(**RUN)
    world.run()
    settle(world, 3)
    assert world.status.held_job is not None
    assert world.status.held_job.text == "Running, 3 devices"


def test_deletion_that_is_refused_is_tried_again_and_said() -> None:
    world = holding(waitDeadlineSeconds=60)
    world.fails = {a.DeleteJob: "403 forbidden: by a policy"}
    world.change(**(RUN | {"apply": "Never", "waitDeadlineSeconds": 60}))
    settle(world, 4)
    assert "403 forbidden: by a policy" in world.condition("Succeeded").message
    assert world.status.held_job is not None
    assert (
        world.status.held_job.message == "it is ended: spec.apply is Never; requests fail: 403 forbidden: by a policy"
    )
    world.run()
    assert "could not be ended: " in world.condition("Succeeded").message
    world.fails = {}
    settle(world)
    assert not world.handed_over
    assert world.status.held_job is None


def test_job_whose_record_somebody_deleted_is_ended_all_the_same() -> None:
    world = holding(ttlSecondsAfterFinished=60)
    (name,) = records(world)
    del world.stored[name]
    world.pass_time(HOUR)
    settle(world)
    assert not world.deleted
    assert world.status.held_job is not None
    world.change(**(RUN | {"apply": "Never"}))
    world.run()
    settle(world)
    assert not world.handed_over
    assert (world.status.job, world.status.held_job) == (None, None)


def test_job_that_is_held_counts_as_a_holder_of_its_nodes() -> None:
    world = holding()
    assert dict(world.snapshot().used_devices) == {"n1": 2, "n2": 1}
    assert not world.snapshot().jobs


def test_plan_that_holds_a_job_looks_at_it_every_minute() -> None:
    world = holding()
    assert requeue_after_seconds(world.snapshot(), world.now) == 60.0
    end_job(world, terminating=True)
    assert requeue_after_seconds(world.snapshot(), world.now) == 5.0


@pytest.mark.usefixtures("each_launcher")
def test_job_that_loses_its_plan_is_known_and_ends_itself() -> None:
    """Whoever deletes a plan may orphan what it owns; the operator finds such jobs by the annotation."""
    free, unlimited, limited = world_of(HandoverRule.FREE), world_of(), world_of(max_hours=2.0)
    for world in (free, unlimited, limited):
        world.run()
        marked = {OWNED_ANNOTATION in one["metadata"]["annotations"] for one in world.handed_over.values()}
        assert marked == {world is not free}
        deadlines = json.dumps(list(world.handed_over.values())).count(f'"activeDeadlineSeconds": {7200 + 28 * 86_400}')
        assert (deadlines > 0) == (world is limited)


def test_reader_tells_of_the_job_by_its_objects_and_pods() -> None:
    world = holding()
    (name, other), resource = list(world.handed_over), "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs"
    made = {"creationTimestamp": "2026-01-01T00:00:00Z"}
    job = copy.deepcopy(world.handed_over[name])
    job["metadata"] |= {"uid": "uid-job"} | made
    foreign = {"metadata": {"name": other, "uid": "x", **made}, "spec": {}}
    pods = {}
    for number, (node_name, phase) in enumerate((("n1", "Running"), ("n1", "Succeeded"), ("", "Pending"))):
        owner = {"kind": "PyTorchJob", "name": name, "uid": "uid-job"}
        labels = {HANDED_OVER_LABEL: "demo", "training.kubeflow.org/job-name": name}
        meta = {"name": f"pod-{number}", "labels": labels, "ownerReferences": [owner], **made}
        container = {"name": "pytorch", "resources": {"limits": {RESOURCE: "2"}}}
        status = {"phase": phase, "startTime": "2026-01-01T00:01:00Z"}
        pods[f"/api/v1/namespaces/default/pods/pod-{number}"] = {
            "metadata": meta,
            "spec": {"nodeName": node_name, "containers": [container]},
            "status": status,
        }
    api = MemoryApi({f"{resource}/{name}": job, f"{resource}/{other}": foreign, **pods})
    reader = SnapshotReader(cast("Any", api), Settings(rules=world.rules))
    bare = replace(world.snapshot(), handed_over=())
    (found,) = asyncio.run(reader._with_handed_over(bare)).handed_over
    assert (found.job.name, found.is_owned, found.devices) == (name, True, 2)
    assert found.held_since == START + timedelta(minutes=1)


class Existing:
    """API server that has an object of every name, as given."""

    def __init__(self, **metadata: Any) -> None:
        self.metadata = metadata

    async def create(self, path: str, body: dict[str, Any]) -> Any:
        raise ApiError(409, f"{body['metadata']['name']} already exists")

    async def get(self, path: str) -> Any:
        return {"metadata": self.metadata}


@pytest.mark.parametrize(
    ("metadata", "refusal"),
    [
        ({"ownerReferences": [{"uid": "uid-1"}]}, None),
        ({"ownerReferences": [{"uid": "uid-1"}], "deletionTimestamp": "now"}, "is still being deleted"),
        ({"annotations": {HANDED_OVER_ANNOTATION: "uid-1"}}, "already exists and belongs to no plan; delete it"),
        ({"ownerReferences": [{"uid": "uid-2"}]}, "already exists with another owner"),
    ],
)
def test_object_of_that_name_is_taken_only_if_the_plan_owns_it(metadata: dict[str, Any], refusal: str | None) -> None:
    world = holding()
    applier = apply.Applier(cast("Any", Existing(**metadata)), cast("Any", None), ObjectCache())
    todo = [a.HandOverJob(manifest) for manifest in world.handed_over.values()]
    with pytest.raises(ApiError, match=refusal) if refusal else nullcontext():
        asyncio.run(applier.apply(world.snapshot(), todo, ReadCache())).check()


def test_record_of_an_owned_job_is_the_plans_too() -> None:
    world = holding()
    (name,) = records(world)
    action = a.CreateConfigMap(name, StoredRole.HANDOVER, world.stored[name].data)
    (owner,) = apply.config_map(world.snapshot().plan, action)["metadata"]["ownerReferences"]
    assert owner["uid"] == "uid-1"


def test_refused_deletion_of_a_job_keeps_no_other_action_back() -> None:
    class Refusing:
        async def delete(self, path: str, uid: str) -> None:
            raise ApiError(403, "forbidden by a policy")

        async def create(self, path: str, body: dict[str, Any], **query: str) -> Any:
            made.append(body["kind"])
            return body

    made: list[str] = []
    world = holding()
    applier = apply.Applier(cast("Any", Refusing()), cast("Any", None), ObjectCache())
    job = next(iter(world.handed_over.values()))
    todo = [a.DeleteJob(job["metadata"]["name"]), a.DryRunJob("key", job)]
    with pytest.raises(ApiError, match="forbidden by a policy"):
        asyncio.run(applier.apply(world.snapshot(), todo, ReadCache())).check()
    assert made == ["PyTorchJob"]
