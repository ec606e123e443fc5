"""Results of plans that differ in fields that former digests left out: sequence parallelism and weights kept gathered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flow_world import World, spec_of

from trainwright import documents
from trainwright.plan import Plan
from trainwright_operator.flow.documents.planned_trials import PlannedTrials, plan_digest
from trainwright_operator.flow.names import DOCUMENT_KEY
from trainwright_operator.flow.snapshot import StoredConfigMap

IN_FLIGHT: dict[str, Any] = json.loads((Path(__file__).parents[2] / "golden" / "plan_in_flight.json").read_text())
"""A plan and its ConfigMaps as an operator with the former digests wrote them: three of four trials are measured."""
CANDIDATES = "demo-6b14a3df-candidates-2"


def world_in_flight() -> World:
    world = World(spec=spec_of(**IN_FLIGHT["spec"]))
    for one in IN_FLIGHT["stored"]:
        world.stored[one["name"]] = StoredConfigMap(one["name"], one["gang"], one["role"], world.now, one["data"])
    return world


def planned(world: World) -> PlannedTrials:
    return documents.loads(world.stored[CANDIDATES].data[DOCUMENT_KEY], PlannedTrials)


def change_plan(world: World, name: str, plan: Plan) -> None:
    """Store the planned trials with another plan of the trial."""
    before = planned(world)
    trials = tuple(replace(one, plan=plan) if one.name == name else one for one in before.trials)
    data = {DOCUMENT_KEY: documents.dumps(replace(before, trials=trials))}
    world.stored[CANDIDATES] = replace(world.stored[CANDIDATES], data=data)


def with_every_run(plan: Plan, **changes: Any) -> Plan:
    return plan.map_stages(
        lambda stage: replace(stage, layers=tuple(run.with_strategy(**changes) for run in stage.layers))
    )


def plan_of(world: World, name: str) -> Plan:
    return next(one.plan for one in planned(world).trials if one.name == name)


def measured_again(world: World) -> set[str]:
    world.run()
    assert world.succeeded == "True"
    results = (name.removesuffix("-result") for name in world.created if name.endswith("-result"))
    return {name.partition("-")[2].partition("-")[2] for name in results}


def test_results_with_former_digests_count() -> None:
    world = world_in_flight()
    assert any(run.strategy.sequence_parallel for stage in plan_of(world, "candidate-2").stages for run in stage.layers)
    assert measured_again(world) == {"baseline-2"}


@pytest.mark.parametrize("name", ["candidate-1", "baseline-1"])
def test_digest_is_the_former_one_where_those_fields_have_their_defaults(name: str) -> None:
    world = world_in_flight()
    outcome = json.loads(world.stored[f"demo-6b14a3df-{name}-result"].data["outcome.json"])
    assert plan_digest(plan_of(world, name)) == outcome["tried"]


def test_a_former_digest_of_two_plans_counts_only_for_the_one_that_has_it_today() -> None:
    world = world_in_flight()
    change_plan(world, "baseline-2", with_every_run(plan_of(world, "candidate-2"), sequence_parallel=False))
    assert measured_again(world) == {"candidate-2", "baseline-2"}


def test_a_result_does_not_count_for_a_plan_without_sequence_parallelism_of_another_trial() -> None:
    world = world_in_flight()
    tried = with_every_run(plan_of(world, "candidate-2"), sequence_parallel=False)
    assert plan_digest(tried) != plan_digest(plan_of(world, "candidate-2"))


def test_a_new_result_of_a_sequence_parallel_plan_does_not_count_for_the_plan_without() -> None:
    world = world_in_flight()
    world.run()
    tried = plan_of(world, "baseline-2")
    assert any(run.strategy.sequence_parallel for stage in tried.stages for run in stage.layers)
    change_plan(world, "baseline-2", with_every_run(tried, sequence_parallel=False))
    world.created.clear()
    world.change(**IN_FLIGHT["spec"])
    assert measured_again(world) == {"baseline-2"}
