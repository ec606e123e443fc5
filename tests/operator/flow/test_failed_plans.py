"""Conditions of a plan that failed: those of later phases are not decided, and name the one that failed."""

from __future__ import annotations

import json
from dataclasses import replace

from flow_harm import fail_pods, run_with, running
from flow_world import World, node, spec_of

from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import Phase
from trainwright_operator.flow.actions import SetStatus
from trainwright_operator.flow.phases.sequence import PHASE_CONDITIONS
from trainwright_operator.flow.quarantine import quarantine, released
from trainwright_operator.plan_figures import Stage, plan_figures

HABIT = "entry point mine:model: layer 1 (Contrast) gives rows together other losses than each alone; give CustomModel whole_batch=True"
REFUSAL = json.dumps({"document": "Failure", "reason": "OrderInvalid", "message": HABIT})
CRASH = '{"document": "Failure", "reason": "Crashed", "message": "no"}'


def states(world: World) -> dict[str, tuple[str, str]]:
    return {one.type.value: (one.status, one.reason) for one in world.status.conditions}


def after(kind: ConditionType) -> tuple[ConditionType, ...]:
    return PHASE_CONDITIONS[PHASE_CONDITIONS.index(kind) + 1 :]


def assert_failed_at(world: World, kind: ConditionType, reason: str) -> None:
    assert states(world)[kind] == ("False", reason) == states(world)["Succeeded"]
    for later in after(kind):
        assert states(world)[later] == ("Unknown", reason)
        assert world.condition(later).message == f"not reached, since {kind} is False, whose message says why"


def test_conditions_after_the_failed_one_are_not_decided_and_name_it() -> None:
    world = run_with(World(), "profile-1", lambda one: fail_pods(one, "profile-1", termination_message=CRASH))
    assert_failed_at(world, ConditionType.PROFILED, "Crashed")
    assert states(world)["LinksMeasured"] == ("True", "Measured")
    told = [one for one in world.events if one.reason == "Crashed"]
    assert [one.message.partition(":")[0] for one in told] == ["Profiled", "Succeeded"]


def test_model_that_a_profiling_gang_refuses_fails_the_plan_with_its_sentence_and_is_not_tried_again() -> None:
    world = run_with(World(), "profile-1", lambda one: fail_pods(one, "profile-1", termination_message=REFUSAL))
    assert_failed_at(world, ConditionType.PROFILED, "OrderInvalid")
    assert HABIT in world.condition("Profiled").message
    assert not world.pods
    world.run()
    assert not world.pods
    assert not [name for name in world.stored if "attempt" in name]


def test_plan_that_fails_after_its_trials_shows_them_no_more_as_completed() -> None:
    world = World(spec=spec_of(trials={"topK": 1}))
    world.run()
    assert states(world)["TrialsCompleted"] == ("True", "AllTrialsFinished")
    (links,) = (name for name in world.stored if name.endswith("-links-result"))
    world.stored[links] = replace(world.stored[links], data={"outcome.json": "{}"})
    world.change(trials={"topK": 2})
    world.run()
    assert_failed_at(world, ConditionType.LINKS_MEASURED, "StoredDocumentInvalid")


def test_edit_that_is_not_accepted_leaves_no_condition_of_before() -> None:
    world = World(spec=spec_of(trials={"topK": 1}))
    world.run()
    winner = world.status.winner
    world.image = ""
    world.change(trials={"topK": 2})
    world.run()
    assert_failed_at(world, ConditionType.ACCEPTED, "WorkerImageMissing")
    assert world.status.winner == winner
    world.image = "worker:1"
    world.change(trials={"topK": 1})
    world.run()
    assert {state for kind, (state, _) in states(world).items() if kind != "Suspended"} == {"True"}


def test_plan_that_goes_on_after_a_failure_waits_for_its_phases_again() -> None:
    world = World(spec=spec_of(waitDeadlineSeconds=20), nodes=(node("n1", schedulable=False),))
    world.run()
    assert_failed_at(world, ConditionType.NODES_DISCOVERED, "WaitDeadlineExceeded")
    world.nodes = (node("n1"),)
    world.change(waitDeadlineSeconds=2000)
    world.run(until=lambda: running(world, "links"))
    assert states(world)["Planned"] == ("Unknown", "NotStarted")
    assert world.run().winner is not None


def test_metric_of_phases_counts_a_failed_plan_as_failed_with_its_reason() -> None:
    world = World(spec=spec_of(trials={"topK": 1}))
    world.run()
    assert plan_figures(world.snapshot().plan, world.status).stage == Stage(Phase.SUCCEEDED, "BestTrialSelected")
    world.image = ""
    world.change(trials={"topK": 2})
    world.run()
    assert plan_figures(world.snapshot().plan, world.status).stage == Stage(Phase.FAILED, "WorkerImageMissing")


def test_quarantined_plan_names_its_end_in_what_was_under_way() -> None:
    world = World()
    world.run(until=lambda: running(world, "profile-1"))
    plan = world.snapshot().plan
    ended = quarantine(plan, RuntimeError("x"), "1", world.now)
    assert isinstance(ended[0], SetStatus)
    world.status = ended[0].status
    assert states(world)["LinksMeasured"][0] == "True"
    assert {states(world)[kind] for kind in ("Profiled", "Planned", "TrialsCompleted")} == {
        ("Unknown", "InternalError")
    }
    world.status = released(world.snapshot().plan, "2").status
    world.step()
    assert states(world)["Planned"] == ("Unknown", "NotStarted")
    assert world.run().winner is not None
