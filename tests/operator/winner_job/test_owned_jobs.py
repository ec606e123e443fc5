"""Winner as a job of the plan's own: it ends with the plan's wish, and the devices come back whatever happens meanwhile."""

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
from flow_handover import JOB, NODES, RUN, record_of
from flow_harm import pass_with_kills, running
from flow_world import RESOURCE, START, World, spec_of

from trainwright_operator.api.installation import Handover, HandoverRule, InstallationRules
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow import actions as a
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.decide import decide, requeue_after_seconds
from trainwright_operator.flow.names import (
    HANDED_OVER_ANNOTATION,
    HANDED_OVER_LABEL,
    OWNED_ANNOTATION,
    PLAN_UID_LABEL,
)
from trainwright_operator.kube import apply
from trainwright_operator.kube.client import ApiError
from trainwright_operator.kube.object_cache import ObjectCache
from trainwright_operator.kube.snapshot_reader import ReadCache, SnapshotReader
from trainwright_operator.settings import Settings

HOUR = 3600.0


def rules(rule: HandoverRule = HandoverRule.OWNED, max_hours: float | None = None) -> InstallationRules:
    return InstallationRules(handover=Handover(rule, max_hours))


def world_of(rule: HandoverRule = HandoverRule.OWNED, max_hours: float | None = None, **spec: Any) -> World:
    return World(spec=spec_of(**(RUN | spec)), nodes=NODES, rules=rules(rule, max_hours))


def holding(rule: HandoverRule = HandoverRule.OWNED, max_hours: float | None = None, **spec: Any) -> World:
    """Return the world of a plan that has its answer, and whose job runs."""
    world = world_of(rule, max_hours, **spec)
    world.run()
    for _ in range(3):
        world.step()
    return world


def settle(world: World, passes: int = 20) -> None:
    for _ in range(passes):
        world.step()


def told(world: World, reason: str) -> list[str]:
    return [one.message for one in world.events if one.reason == reason]


def records(world: World) -> list[str]:
    return [one.name for one in world.stored.values() if one.role == StoredRole.HANDOVER]


def end_job(world: World, **changes: Any) -> None:
    for name in list(world.winner_jobs):
        world.change_winner_job(name, **changes)


@pytest.mark.usefixtures("each_launcher")
def test_plan_owns_its_job_and_says_that_it_holds_it() -> None:
    world = holding()
    (owner,) = {json.dumps(one["metadata"]["ownerReferences"]) for one in world.handed_over.values()}
    (reference,) = json.loads(owner)
    assert (reference["kind"], reference["uid"], reference["controller"]) == ("TrainingPlan", "uid-1", True)
    assert not any(PLAN_UID_LABEL in one["metadata"]["labels"] for one in world.handed_over.values())
    held = world.status.held_job
    assert held is not None
    assert world.status.job is not None
    assert world.status.job.owned
    assert held.name == world.status.job.names[0]
    is_queued = world.spec.queue_name is not None
    assert (held.text, held.devices) == (("Suspended", 0) if is_queued else ("Running, 3 devices", 3))
    assert ", which is the plan's own" in world.condition("Succeeded").message
    (event,) = told(world, "JobHandedOver")
    assert held.name in event
    assert "it ends with the plan, by spec.apply: Never or spec.suspend: true" in event


@pytest.mark.usefixtures("each_launcher")
def test_apply_never_gives_the_devices_back() -> None:
    world = holding()
    name = world.status.held_job.name  # type: ignore[union-attr]
    world.change(**(RUN | {"apply": "Never"}))
    world.step()
    assert all(one.job.terminating for one in world.winner_jobs.values())
    world.run()
    assert not world.handed_over
    assert not records(world)
    assert (world.status.job, world.status.held_job) == (None, None)
    assert world.succeeded == "True"
    assert told(world, "JobEnded") == [f"the plan holds the {world_kind(world)} {name} no more: spec.apply is Never"]
    settle(world)
    assert not world.handed_over


def world_kind(world: World) -> str:
    return "PyTorchJob" if world.spec.launcher in (None, LauncherKind.PYTORCH_JOB) else "JobSet"


def test_apply_never_ends_the_job_before_the_edited_plan_is_measured_anew() -> None:
    world = holding()
    world.change(**(RUN | {"apply": "Never", "profiling": {"iterations": 11}}))
    settle(world, 3)
    assert not world.handed_over
    assert world.succeeded == "Unknown"
    world.run()
    assert world.succeeded == "True"


def test_apply_never_ends_the_job_of_a_plan_that_is_not_accepted() -> None:
    world = holding()
    volumes = {"spec": {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}}
    world.change(**(RUN | {"apply": "Never", "worker": {"podTemplate": volumes}}))
    settle(world, 3)
    assert world.condition("Accepted").reason == "PodTemplateNotAllowed"
    assert not world.handed_over


@pytest.mark.parametrize("passes_between", range(6))
def test_apply_run_after_never_hands_over_anew(passes_between: int) -> None:
    world = holding()
    before = copy.deepcopy(world.handed_over)
    world.change(**(RUN | {"apply": "Never"}))
    settle(world, passes_between)
    world.change(**(RUN | {"job": JOB | {"image": "lab/train:8"}}))
    world.run()
    settle(world)
    assert list(world.handed_over) == list(before)
    image = "lab/train:8" if passes_between else "lab/train:7"  # an edit that nobody saw ends nothing
    assert image in json.dumps(world.handed_over)
    assert world.status.held_job is not None
    assert world.status.held_job.devices == 3


def test_suspended_plan_gives_its_devices_back_and_trains_on_afterwards() -> None:
    world = holding(max_hours=2.0)
    before = copy.deepcopy(world.handed_over)
    world.pass_time(HOUR)
    world.change(**(RUN | {"suspend": True}))
    settle(world, 5)
    assert not world.handed_over
    assert world.status.held_job is None
    (event,) = told(world, "JobEnded")
    assert "spec.suspend is true; it is created anew once that is false" in event
    world.pass_time(10 * HOUR)
    world.change(**RUN)
    world.run()
    settle(world, 3)
    assert world.handed_over == before
    assert world.status.held_job is not None
    assert world.status.held_job.ends_at is not None
    left = (world.status.held_job.ends_at - world.now).total_seconds()
    assert HOUR - 120 < left < HOUR  # the hours from before the suspension count, the suspension does not


def test_suspended_plan_whose_job_is_unwanted_meanwhile_makes_none() -> None:
    world = holding()
    for edit in ({"suspend": True}, {"suspend": True, "apply": "Never"}, {"apply": "Never"}):
        world.change(**(RUN | edit))
        settle(world, 4)
    world.run()
    assert not world.handed_over
    assert not records(world)
    assert world.status.job is None


def test_job_that_waits_for_its_user_is_the_plans_own_too() -> None:
    world = holding(apply="Suspended", max_hours=1.0)
    held = world.status.held_job
    assert held is not None
    assert (held.text, held.ends_at) == ("Suspended", None)
    world.pass_time(5 * HOUR)
    settle(world)
    assert world.handed_over  # it held nothing
    world.change(**(RUN | {"apply": "Never"}))
    world.run()
    assert not world.handed_over


def test_hours_of_the_installation_end_a_job() -> None:
    world = holding(max_hours=2.0)
    ends_at = world.status.held_job.ends_at  # type: ignore[union-attr]
    assert ends_at is not None
    assert 1.9 * HOUR < (ends_at - world.now).total_seconds() < 2 * HOUR
    world.pass_time(1.9 * HOUR)
    settle(world, 3)
    assert world.handed_over
    world.pass_time(0.1 * HOUR)
    settle(world)
    assert not world.handed_over
    ended = world.status.job.ended  # type: ignore[union-attr]
    assert ended is not None
    assert ended.reason == "MaxHoursReached"
    (event,) = [one for one in world.events if one.reason == "JobEnded"]
    assert event.type == "Warning"
    assert "the 2 hours that this installation allows (handover.maxHours)" in event.message
    world.change(**(RUN | {"priority": 1}))
    world.run()
    settle(world)
    assert not world.handed_over  # no edit but that to Never and back makes another one
    world.change(**(RUN | {"apply": "Never"}))
    world.run()
    world.change(**RUN)
    world.run()
    settle(world, 3)
    assert world.status.held_job is not None


def test_hours_count_only_while_the_job_holds_devices() -> None:
    world = holding(max_hours=2.0)
    world.pass_time(HOUR)
    world.step()
    end_job(world, suspended=True)  # as its queue may
    world.step()
    world.pass_time(9 * HOUR)
    settle(world, 3)
    assert world.status.held_job.text == "Suspended"  # type: ignore[union-attr]
    end_job(world, suspended=False)
    settle(world, 3)
    assert world.handed_over
    world.pass_time(0.9 * HOUR)
    settle(world, 3)
    assert world.handed_over
    world.pass_time(0.2 * HOUR)
    settle(world, 3)
    assert not world.handed_over


def test_limit_holds_for_a_job_that_runs_when_it_is_set() -> None:
    world = holding()
    world.pass_time(3 * HOUR)
    world.rules = rules(max_hours=2.0)
    settle(world)
    assert not world.handed_over


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"succeeded": True}, "Succeeded", "it succeeded"),
        ({"failed_at": True, "message": "pod n0 exited with 1"}, "Failed", "it failed: pod n0 exited with 1"),
    ],
)
def test_job_that_ended_is_held_no_more_and_keeps_its_logs(changes: dict[str, Any], reason: str, words: str) -> None:
    world = holding()
    end_job(world, **({**changes, "failed_at": world.now} if "failed_at" in changes else changes))
    settle(world)
    assert world.handed_over
    assert world.status.held_job is None
    assert world.status.job.ended.reason == reason  # type: ignore[union-attr]
    assert told(world, "JobEnded")[0].endswith(words)
    for name in list(world.winner_jobs):
        world.delete_winner_job(name)  # by somebody who cleans up
    settle(world)
    assert world.status.job.ended.reason == reason  # type: ignore[union-attr]
    world.change(**(RUN | {"suspend": True}))
    settle(world, 3)
    world.change(**RUN)
    world.run()
    assert not world.handed_over


@pytest.mark.usefixtures("each_launcher")
def test_job_that_somebody_deleted_is_not_made_again() -> None:
    world = holding()
    for name in list(world.winner_jobs):
        world.delete_winner_job(name)
    settle(world)
    world.change(**(RUN | {"priority": 1}))
    world.run()
    settle(world)
    assert not world.handed_over
    assert world.status.job.ended.reason == "Deleted"  # type: ignore[union-attr]
    assert told(world, "JobEnded")[0].endswith("somebody deleted it; for another one set apply: Never, then Run again")


def test_job_that_only_seemed_to_be_deleted_is_held_as_before() -> None:
    world = holding(max_hours=2.0)
    world.apply(decide(replace(world.snapshot(), handed_over=()), world.now))
    settle(world)
    assert world.status.held_job is not None
    assert world.status.job.ended is None  # type: ignore[union-attr]
    world.pass_time(2 * HOUR)
    settle(world)
    assert world.status.job.ended.reason == "MaxHoursReached"  # type: ignore[union-attr]
    assert not world.handed_over


def test_time_to_live_begins_when_the_job_ends() -> None:
    world = holding(ttlSecondsAfterFinished=60)
    world.pass_time(10 * HOUR)
    settle(world)
    assert not world.deleted
    end_job(world, succeeded=True)
    settle(world, 5)
    assert not world.deleted
    assert 40 < requeue_after_seconds(world.snapshot(), world.now) <= 60
    world.pass_time(60.0)
    world.step()
    assert world.deleted


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
    world = holding()
    (name,) = records(world)
    del world.stored[name]
    settle(world)
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
