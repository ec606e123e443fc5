"""Restarts: killing the operator at any point, or doing everything twice, changes nothing; every run ends."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from flow_world import World, node, spec_of
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright_operator.flow.actions import CreateConfigMap, StoredRole

NAMED = {"BestTrialSelected", "AllTrialsFailed", "Crashed", "MetricsUnavailable"}


def small(per_gang: int = 1, fault: str = "") -> World:
    """Return a world whose plan has its answer after few passes."""
    spec = spec_of(
        search={"planner": "Megatron", "limits": {"maxTensorDegree": 1}},
        trials={"topK": 1, "pendingDeadlineSeconds": 60, "perGang": per_gang},
    )
    annotations = {"trainwright.dev/rehearse-fault": fault} if fault else {}
    return World(spec=spec, nodes=(node("n1", devices=1), node("n2", devices=1)), annotations=annotations)


def winner(world: World):
    found = world.run().winner
    return found.trial, found.plan, found.measured_seconds


@pytest.mark.parametrize(
    ("per_gang", "fault"),
    [
        pytest.param(1, "", id="one by one"),
        pytest.param(3, "", id="series"),
        pytest.param(1, "baseline-2=crash", id="a trial crashes"),
        pytest.param(3, "baseline-2=crash", id="a trial of a series crashes"),
    ],
)
def test_operator_finds_same_winner_when_killed_before_any_action(per_gang: int, fault: str) -> None:
    """A kill after the last action of a pass is one before the first of the next."""
    undisturbed = small(per_gang, fault)
    expected = winner(undisturbed)
    world, boundaries = small(per_gang, fault), 0
    while world.succeeded == "Unknown":
        todo = world.decide()
        for number in range(len(todo)):
            killed = copy.deepcopy(world)
            killed.apply(todo[:number])
            killed.restart()
            assert winner(killed) == expected, todo[number]
            assert sorted(killed.created) == sorted(undisturbed.created), todo[number]
            assert not killed.jobs
            assert not killed.policies
            assert not [one.name for one in killed.stored.values() if one.role == StoredRole.TASK]
            boundaries += 1
        world.apply(todo)
        world.pass_time(2.0)
    assert boundaries > 50


def test_actions_are_idempotent() -> None:
    once, twice = World(), World()
    for _ in range(300):
        todo = once.decide()
        assert [type(action) for action in twice.decide()] == [type(action) for action in todo]
        once.apply(todo)
        twice.apply(todo)
        twice.apply([action for action in todo if type(action).__name__ != "EmitEvent"])
        assert twice.stored == once.stored
        assert twice.jobs == once.jobs
        assert twice.pods == once.pods
        assert twice.status == once.status
        once.pass_time(2.0)
        twice.pass_time(2.0)
        if once.succeeded != "Unknown":
            return
    raise AssertionError("no end")


HARMS = (
    "nothing", "delete a job", "fail a pod", "lose a pod", "evict", "hide the image", "restart", "occupy", "free", "mute",
    "refuse jobs", "admit jobs", "break the webhook", "edit", "suspend",
)  # fmt: skip


def harm(world: World, what: str) -> None:  # noqa: C901, PLR0912 - one case per harm
    pod = next(iter(world.pods.values()), None)
    if what == "restart":
        world.restart()
    elif what == "occupy":
        world.others = {"n1": 1}
    elif what == "free":
        world.others = {}
    elif what == "refuse jobs":
        world.refuse_jobs = "exceeded quota: gpus"
    elif what == "admit jobs":
        world.refuse_jobs = ""
    elif what == "break the webhook":
        world.fails = {CreateConfigMap: "webhook is down"}
    elif what in ("edit", "suspend"):
        world.spec = world.spec.model_copy(update={"suspend": what == "suspend"})
        world.generation += 1
    elif what == "mute":
        world.log = lambda order: "nothing to say\n"
    elif what == "delete a job" and world.jobs:
        world.delete_job(next(iter(world.jobs)))
    elif pod is not None and what == "evict":
        world.pods[pod.name] = replace(pod, phase="Failed", reason="Evicted", containers=())
    elif pod is not None and what == "lose a pod":
        del world.pods[pod.name]
    elif pod is not None and pod.containers and what == "fail a pod":
        ended = replace(pod.containers[0], exit_code=1, running_since=None, started_at=world.now, finished_at=world.now)
        world.pods[pod.name] = replace(pod, phase="Failed", containers=(ended,))
    elif pod is not None and pod.containers and pod.phase == "Running" and what == "hide the image":
        stuck = replace(pod.containers[0], running_since=None, waiting_reason="ErrImagePull")
        world.pods[pod.name] = replace(pod, phase="Pending", containers=(stuck,))


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from(HARMS)), max_size=8), st.sampled_from([1, 2]))
def test_every_scenario_ends_with_a_reason_and_no_running_jobs(story: list[tuple[int, str]], per_gang: int) -> None:
    world = small(per_gang)
    for steps, what in story:
        for _ in range(steps):
            world.step()
        harm(world, what)
    # What lacks is waited for, so it comes back at the end.
    world.others, world.refuse_jobs, world.fails = {}, "", {}
    if world.spec.suspend:
        harm(world, "edit")
    world.run(steps=3000)
    world.step()
    world.step()
    assert world.condition("Succeeded").reason in NAMED
    assert world.jobs == {}
    assert world.decide() == []
    lost = [stored.gang for stored in world.stored.values() if stored.role == StoredRole.ATTEMPT]
    assert len(lost) == len(set(lost)), "of each gang only the last lost attempt is kept"
    for trial in world.status.trials:
        assert trial.state.is_final
        assert trial.reason
