"""Edits of a plan's spec: measurements stay, and transient failures are measured again."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from flow_harm import fail_pods, running
from flow_reports import log_of, report_of
from flow_world import World, spec_of

from trainwright import documents
from trainwright.worker_api import Failure, FailureReason, TrialTask
from trainwright_operator.flow.documents.planned_trials import PlannedTrials
from trainwright_operator.flow.gangs.pod_template import TASK_FILE
from trainwright_operator.flow.names import DOCUMENT_KEY
from trainwright_operator.flow.snapshot import ContainerFacts


def states(world: World) -> dict[str, str]:
    return {trial.name: str(trial.state) for trial in world.status.trials}


@pytest.mark.parametrize("section", ["links", "profiling"])
def test_phase_is_repeated_after_an_edit_when_it_timed_out(section: str) -> None:
    world = World()
    world.change(links={"deadlineSeconds": 60}, profiling={"deadlineSeconds": 60})
    gang = {"links": "links", "profiling": "profile-1"}[section]
    world.run(until=lambda: any(job.gang == gang for job in world.jobs.values()))
    world.run_seconds = 1000.0
    world.run()
    assert (world.succeeded, world.condition("Succeeded").reason) == ("False", "DeadlineExceeded")
    world.run_seconds = 10.0
    world.change(**{section: {"deadlineSeconds": 600}})
    world.run()
    assert world.succeeded == "True"


def test_only_timed_out_trials_are_repeated_after_an_edit() -> None:
    world = World(annotations={"trainwright.dev/rehearse-fault": "baseline-1=crash"})
    world.run(until=lambda: states(world).get("baseline-1") == "Failed")
    world.run_seconds = 1000.0
    world.run()
    before = {trial.name: trial for trial in world.status.trials}
    unlucky = [name for name, trial in before.items() if trial.reason == "DeadlineExceeded"]
    assert unlucky
    world.run_seconds = 10.0
    world.created.clear()
    world.change(trials={"runDeadlineSeconds": 1000, "maxFailed": 5})
    world.run()
    after = {trial.name: trial for trial in world.status.trials}
    assert after["candidate-1"] == before["candidate-1"]
    assert after["baseline-1"] == before["baseline-1"]
    assert after["baseline-1"].reason == "Crashed"
    assert {after[name].state for name in unlucky} == {"Succeeded"}
    again = {name.removesuffix("-order").partition("-")[2] for name in world.created if name.endswith("-order")}
    assert not any(name.endswith(("links", "candidate-1", "baseline-1")) for name in again)


def test_raised_deadline_outlasts_the_jobs_deadline_while_devices_are_in_use() -> None:
    world = World(others={"n1": 2, "n2": 2, "n3": 2})
    own: list[int] = []
    create = world._create_job

    def seen(manifest: dict[str, Any]) -> None:
        own.append(manifest["spec"]["runPolicy"]["activeDeadlineSeconds"])
        create(manifest)

    world._create_job = seen
    world.run(until=lambda: bool(world.jobs))
    week = 7 * 24 * 3600
    world.change(links={"deadlineSeconds": week})
    assert min(own) > 2 * week, "it may run for a week once it has waited for one"
    world.step()
    world.pass_time(week - 60)
    world.step()
    assert world.condition("LinksMeasured").reason == "WaitingForCapacity"
    world.others = {}
    world.run()
    assert world.succeeded == "True"


def test_job_past_its_own_deadline_is_recreated() -> None:
    world = World(others={"n1": 2, "n2": 2, "n3": 2})
    world.run(until=lambda: bool(world.jobs))
    world.pods = {}
    words = "it was active longer than specified deadline"
    world.jobs = {name: replace(job, failed_at=world.now, message=words) for name, job in world.jobs.items()}
    world.run(until=lambda: world.condition("Succeeded").reason == "PodLost")
    assert words in world.condition("Succeeded").message
    world.others = {}
    world.run()
    assert world.succeeded == "True"


def test_failed_image_pull_is_repeated_after_an_edit() -> None:
    world = World()
    world.run(until=lambda: bool(world.pods))
    stuck = ContainerFacts("pytorch", waiting_reason="InvalidImageName", waiting_message="no such image")
    world.pods = {name: replace(pod, containers=(stuck,)) for name, pod in world.pods.items()}
    world.run()
    assert world.condition("Succeeded").reason == "ImagePullFailed"
    world.change(links={"deadlineSeconds": 301})
    world.run()
    assert world.succeeded == "True"


def test_failure_stays_without_an_edit() -> None:
    world = World(run_seconds=1000.0)
    world.run()
    world.run_seconds = 10.0
    world.restart()
    for _ in range(20):
        world.step()
    assert world.condition("Succeeded").reason == "DeadlineExceeded"


@pytest.mark.parametrize("per_gang", [1, 3])
def test_trial_is_repeated_when_its_result_is_of_another_plan(per_gang: int) -> None:
    world = World(spec=spec_of(trials={"topK": 2, "baseline": "None", "perGang": per_gang}))
    world.run()
    (result,) = (one for name, one in world.stored.items() if "candidate-1" in name and one.role == "result")
    outcome = json.loads(result.data["outcome.json"])
    assert outcome["tried"]
    # As if a search of another version had ranked another plan first.
    changed = {**result.data, "outcome.json": json.dumps({**outcome, "tried": "0" * 16})}
    world.stored[result.name] = replace(result, data=changed)
    ordered = len(world.created)
    world.change(trials={"topK": 3, "baseline": "None", "perGang": per_gang})
    world.run()
    assert world.succeeded == "True"
    again = [name for name in world.created[ordered:] if "candidate-1" in name and name.endswith("-result")]
    assert len(again) == 1
    assert not [name for name in world.created[ordered:] if "candidate-2" in name and name.endswith("-result")]


def end_without_a_pass(world: World, gang: str) -> None:
    """Let the pods of a gang end before the operator looks again."""
    for name, pod in world.pods.items():
        if pod.gang == gang:
            log = log_of(report_of(world.order_of(pod))) if pod.reports else pod.log
            world.pods[name] = replace(pod, log=log, phase="Succeeded")


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(("per_gang", "gang"), [(1, "candidate-1"), (2, "candidate-1s")])
def test_trials_go_on_while_an_edit_is_planned(per_gang: int, gang: str, ends: bool) -> None:
    world = World(spec=spec_of(trials={"topK": 2, "perGang": per_gang}))
    world.run(until=lambda: running(world, gang))
    if ends:
        end_without_a_pass(world, gang)
    world.change(trials={"topK": 3, "perGang": per_gang})
    world.run()
    assert world.succeeded == "True"
    assert sum("-candidate-1" in name and name.endswith("-order") for name in world.created) == 1


def test_running_trial_is_replaced_when_it_runs_a_plan_of_a_former_search() -> None:
    world = World(spec=spec_of(trials={"topK": 2}))
    world.run(until=lambda: running(world, "candidate-1"))
    (stored,) = (one for name, one in world.stored.items() if name.endswith("-candidates-2"))
    planned: PlannedTrials = documents.loads(stored.data[DOCUMENT_KEY], PlannedTrials, source=stored.name)
    (task_map,) = (one for name, one in world.stored.items() if name.endswith("-candidate-1-order"))
    task: TrialTask = documents.loads(task_map.data[TASK_FILE], TrialTask, source=task_map.name)
    other = replace(task, plan=next(one.plan for one in planned.trials if one.name == "candidate-2"))
    changed = {**task_map.data, TASK_FILE: documents.dumps(other)}
    world.stored[task_map.name] = replace(task_map, data=changed)
    world.run()
    assert world.succeeded == "True"
    assert sum(name.endswith("-candidate-1-order") for name in world.created) == 2
    assert sum(name.endswith("-candidate-1-result") for name in world.created) == 1


def test_result_is_stored_when_an_edit_drops_a_trial_that_has_just_ended() -> None:
    world = World(spec=spec_of(trials={"topK": 3}))
    world.run(until=lambda: running(world, "candidate-3"))
    end_without_a_pass(world, "candidate-3")
    world.change(trials={"topK": 2})
    world.run()
    world.change(trials={"topK": 3})
    world.run()
    assert world.succeeded == "True"
    assert sum(name.endswith("-candidate-3-order") for name in world.created) == 1


@pytest.mark.parametrize(("gang", "section"), [("links", "links"), ("profile-1", "profiling")])
@pytest.mark.parametrize(("seconds", "reason"), [(100.0, "Hang"), (272.0, "DeadlineExceeded")])
def test_timed_out_measurement_is_repeated_with_a_later_deadline(
    gang: str, section: str, seconds: float, reason: str
) -> None:
    words = documents.dumps(Failure(FailureReason.HANG, "it did not come to its end", node="n1"))
    world = World(run_seconds=1000.0, spec=spec_of(links={"deadlineSeconds": 300}, profiling={"deadlineSeconds": 300}))
    if gang != "links":
        world.run_seconds = 10.0
        world.run(until=lambda: any(job.gang == gang for job in world.jobs.values()))
        world.run_seconds = 1000.0
    world.run(until=lambda: running(world, gang))
    world.now += timedelta(seconds=seconds)
    fail_pods(world, gang, termination_message=words)
    world.run()
    assert world.condition("Succeeded").reason == reason
    world.run_seconds = 10.0
    world.change(**{section: {"deadlineSeconds": 900}})
    world.run()
    assert world.succeeded == ("True" if reason == "DeadlineExceeded" else "False")


def test_device_time_of_a_trial_that_an_edit_repeats_counts() -> None:
    limits = {"topK": 1, "baseline": "None", "runDeadlineSeconds": 240}
    world = World(spec=spec_of(trials={**limits, "maxDeviceHours": 6 * 250.0 / 3600}))
    world.run(until=lambda: running(world, "candidate-1"))
    world.run_seconds = 1000.0
    world.run()
    assert world.trial("candidate-1").reason == "DeadlineExceeded"
    world.run_seconds = 10.0
    world.change(trials={**limits, "maxDeviceHours": 6 * 251.0 / 3600})
    world.run()
    assert world.trial("candidate-1").reason == "DeviceHoursExhausted"
