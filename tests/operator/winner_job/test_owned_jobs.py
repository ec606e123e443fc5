"""Winner as a job of the plan's own: it ends with the plan's wish, after its hours, or when it is done."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from flow_handover import JOB, RUN
from flow_owned_jobs import HOUR, end_job, holding, records, rules, settle, told
from flow_world import World

from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.decide import decide, requeue_after_seconds
from trainwright_operator.flow.names import (
    PLAN_UID_LABEL,
)


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
