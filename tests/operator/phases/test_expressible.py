"""Plans that a trainer supports, from the spec to the winner, and what other plans would gain."""

from __future__ import annotations

import dataclasses

import pytest
from flow_world import World, node, spec_of

from trainwright import documents
from trainwright.exports import TARGETS, is_expressible
from trainwright.plan import Plan
from trainwright_operator.api.spec import Trainer
from trainwright_operator.flow.documents.planned_trials import PlannedTrials
from trainwright_operator.flow.snapshot import NodeFacts

THREE = (node("n1"), node("n2", "emulated-t4", devices=1))
UNEQUAL = (node("n1", devices=1), node("n2", "emulated-t4", devices=1))
"""Two devices whose best plan has uneven rows."""


def plan_for(trainer: Trainer | None, nodes: tuple[NodeFacts, ...] = THREE) -> World:
    asked = {} if trainer is None else {"expressibleBy": trainer.value}
    search = {"planner": "Auto", "effort": 0.1, "tolerance": 0.0, "limits": {"maxTensorDegree": 2}, **asked}
    world = World(nodes=nodes, spec=spec_of(search=search, trials={"topK": 2}))
    world.run()
    return world


def planned(world: World) -> PlannedTrials:
    assert world.status.candidates_ref is not None
    stored = world.stored[world.status.candidates_ref.config_map].data["document.json"]
    found: PlannedTrials = documents.loads(stored, PlannedTrials)
    return found


@pytest.mark.parametrize("trainer", list(Trainer))
def test_only_plans_of_the_trainer_are_tried(trainer: Trainer) -> None:
    world = plan_for(trainer)
    assert all(is_expressible(one.plan, TARGETS[trainer.target].capabilities) for one in planned(world).trials)
    assert world.status.winner is not None
    winner: Plan = documents.parse(world.status.winner.plan, Plan)
    assert is_expressible(winner, TARGETS[trainer.target].capabilities)


def test_status_says_what_other_plans_would_gain() -> None:
    world, free = plan_for(Trainer.ACCELERATE, UNEQUAL), plan_for(None, UNEQUAL)
    best = planned(world).best.predicted_seconds
    unlimited = world.status.unlimited
    assert unlimited is not None
    assert unlimited.predicted_seconds == pytest.approx(planned(free).best.predicted_seconds, rel=1e-2)
    assert unlimited.gain == pytest.approx(1 - unlimited.predicted_seconds / best, rel=1e-2)
    assert unlimited.gain > 0.05
    sentence = f"without search.expressibleBy an iteration would take {unlimited.predicted_seconds:.4g} s"
    assert sentence in world.condition("Planned").message


def test_plan_without_a_trainer_stores_and_says_nothing_of_the_limit() -> None:
    world = plan_for(None)
    assert "unlimited" not in world.status.dump()
    assert world.status.candidates_ref is not None
    assert "unlimited" not in world.stored[world.status.candidates_ref.config_map].data["document.json"]
    assert "expressibleBy" not in world.condition("Planned").message


def test_gain_is_none_where_the_limited_search_found_the_faster_plan() -> None:
    found = planned(plan_for(Trainer.MEGATRON))
    slower = dataclasses.replace(found, unlimited_seconds=2 * found.best.predicted_seconds)
    assert slower.unlimited_gain == 0.0
