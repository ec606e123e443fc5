"""Edits of the trials of a plan that has ended, whose node is gone since: planned without it, up to a winner."""

from __future__ import annotations

from typing import Any

import pytest
from flow_jobs import pods_of_job
from flow_series import states
from flow_world import World

from trainwright_operator.flow.gangs.scheduling import pinned_node

LOST = "n1"
LONGER = 5000.0
"""Seconds that exceed every deadline."""


def until_gang(world: World, gang: str) -> None:
    world.run(until=lambda: any(job.gang == gang for job in world.jobs.values()))


def answered() -> World:
    world = World()
    world.run()
    assert LOST in devices_of_winner(world)
    return world


def failed_at(gang: str, reason: str) -> World:
    """Return a plan that failed with this reason since its gangs from this one on exceeded their deadlines."""
    world = World()
    until_gang(world, gang)
    world.run_seconds = LONGER
    while world.succeeded == "Unknown":
        world.step(30.0)
    assert (world.succeeded, world.condition("Succeeded").reason) == ("False", reason)
    world.run_seconds = 10.0
    return world


def ended_plan(end: str) -> World:
    """Return a plan that ended so, whose node is gone since."""
    gangs = {"links": "DeadlineExceeded", "profile-1": "DeadlineExceeded", "candidate-1": "AllTrialsFailed"}
    world = answered() if end == "answer" else failed_at(end, gangs[end])
    world.nodes = tuple(one for one in world.nodes if one.name != LOST)
    for _ in range(20):
        world.step(30.0)
    assert world.status.cluster.revision == 1, "only an edit takes it up again"
    return world


def devices_of_winner(world: World) -> set[str]:
    stages = [stage for one in world.status.winner.plan["pipelines"] for stage in one["stages"]]
    return {device["node"] for stage in stages for device in stage["devices"]}


def run_without_failure(world: World, *, restarts: bool = False) -> None:
    """Run to the answer; the plan never fails on the way. With `restarts` the operator is killed now and then."""
    passes = 0

    def is_answered() -> bool:
        nonlocal passes
        passes += 1
        if restarts and passes % 7 == 0:
            world.restart()
        found = world.condition("Succeeded")
        is_present = found.observed_generation == world.generation
        assert not is_present or found.status != "False", found.message
        return bool(is_present and found.status == "True")

    world.run(until=is_answered)


def check_answer(world: World, *, revision: int) -> None:
    assert (world.succeeded, world.condition("Succeeded").reason) == ("True", "BestTrialSelected")
    assert [one.name for one in world.status.cluster.nodes] == ["n2", "n3"]
    assert devices_of_winner(world) <= {"n2", "n3"}
    assert (world.status.cluster.revision, world.status.winner.revision) == (revision, revision)
    assert set(states(world).values()) == {"Succeeded"}
    assert world.status.cluster.change is None
    assert not world.jobs


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("end", ["answer", "links", "profile-1", "candidate-1"])
def test_further_candidates_are_planned_without_the_node(end: str, restarts: bool) -> None:
    world = ended_plan(end)
    world.change(trials={"topK": 4})
    run_without_failure(world, restarts=restarts)
    check_answer(world, revision=2)
    assert any(event.reason == "NodesChanged" and LOST in event.message for event in world.events)


@pytest.mark.parametrize("trials", [{"topK": 2}, {"maxFailed": 4}, {"perGang": 2}])
@pytest.mark.parametrize("end", ["answer", "links", "candidate-1"])
def test_plan_is_tried_again_without_the_node(end: str, trials: dict[str, Any]) -> None:
    world = ended_plan(end)
    world.change(trials=trials)
    run_without_failure(world)
    check_answer(world, revision=2)


def test_winner_on_a_node_that_is_gone_is_not_handed_over() -> None:
    world = ended_plan("answer")
    world.change(apply="Run", job={"image": "lab/train:7", "command": ["train"]})
    for _ in range(3):
        world.step(1.0)
    waiting = world.condition("Succeeded")
    assert (waiting.status, waiting.reason) == ("Unknown", "WaitingForNodes")
    assert "n1: it no longer exists" in waiting.message
    assert world.status.winner is not None
    run_without_failure(world)
    check_answer(world, revision=2)
    pods = [template for one in world.handed_over.values() for _, template in pods_of_job(one)]
    assert {pinned_node(one["spec"]["affinity"]) for one in pods} <= {"n2", "n3"}


def test_plan_that_may_wait_no_longer_has_its_answer_but_hands_nothing_over() -> None:
    world = ended_plan("answer")
    job = {"image": "lab/train:7", "command": ["train"]}
    world.change(apply="Run", job=job, settlingSeconds=3600, waitDeadlineSeconds=60)
    for _ in range(10):
        world.step(30.0)
    assert (world.succeeded, world.status.winner.revision) == ("True", 1)
    assert not world.handed_over


def test_winner_counts_once_its_node_is_back() -> None:
    world = ended_plan("answer")
    world.change(trials={"maxFailed": 4})
    world.step(1.0)
    world.nodes = World().nodes
    run_without_failure(world)
    assert world.status.winner.revision == 1


@pytest.mark.parametrize("end", ["answer", "links", "candidate-1"])
def test_other_trials_begin_with_the_nodes_that_there_are(end: str) -> None:
    world = ended_plan(end)
    ordered = len(world.created)
    world.change(trials={"iterations": 20})
    run_without_failure(world)
    check_answer(world, revision=1)
    assert any(name.endswith("-discovery") for name in world.created[ordered:])


@pytest.mark.parametrize("end", ["answer", "candidate-1"])
def test_edit_without_any_node_left_waits_for_one(end: str) -> None:
    world = ended_plan(end)
    whole, world.nodes = world.nodes, ()
    world.change(trials={"topK": 4})
    for _ in range(60):
        world.step(10.0)
    found = world.condition("Succeeded")
    assert (found.status, found.reason) == ("Unknown", "NoUsableNodes")
    assert not world.jobs
    world.nodes = whole
    run_without_failure(world)
    check_answer(world, revision=2)
