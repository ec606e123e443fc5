"""Whatever copies, compares or stores plans tells two apart that differ in any one field of a strategy, or says why not."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest

from trainwright import documents
from trainwright.cluster import Cluster, Device
from trainwright.cost.estimate import estimate_with_context
from trainwright.exports import TARGETS, ExportRequest, is_expressible, nearest_plan
from trainwright.exports.plan_shorthand import plan_of_shorthand
from trainwright.exports.uniform_shape import shape_of
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Stage
from trainwright.search import Problem
from trainwright.search.alpa.intra.nearest_degrees import NearestDegrees
from trainwright.search.auto.layer_rebalancing import StageConfig
from trainwright.search.auto.neighbourhood import editable_pipelines
from trainwright.search.auto.neighbourhood.layer_moves import insert_or_remove_stages
from trainwright.search.candidates import DeviceSymmetry, plan_shape
from trainwright.search.galvatron.galvatron_model import estimate_seconds
from trainwright.search.galvatron.layer_classes import decision_trees, strategy_of_tree
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.search.preference.plan_adaptation import shrink_to_devices, with_layer_counts
from trainwright.strategy import RankOrder, Sharding, Strategy
from trainwright_operator.flow.documents.planned_trials import plan_digest

BASE = Strategy(2, 2, sharding=Sharding.ZERO3)
OTHER: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 1, "data": 4},
    "data": {"tensor": 1, "data": 4},
    "order": {"order": RankOrder.DATA_INNER},
    "sharding": {"sharding": Sharding.ZERO1},
    "recompute": {"recompute": True},
    "sequence_parallel": {"sequence_parallel": True},
    "keep_gathered_weights": {"keep_gathered_weights": True},
}
"""Changes of each field; a degree is changed with the other one, since their product is the stage's devices."""
DEVICES = tuple(Device(f"node-{number}", slot) for number in (1, 2) for slot in (0, 1))
LAYERS = 14
FIELDS = [field.name for field in fields(Strategy)]


def runs_of(strategy: Strategy, first: int = 0, count: int = LAYERS) -> LayerRun:
    return LayerRun(first, count, strategy, (4 // strategy.data,) * strategy.data)


def plan_of(*runs: LayerRun) -> Plan:
    return Plan(LAYERS, 8, (Pipeline(2, 4, (Stage(DEVICES, runs),)),))


def changed(field: str) -> Strategy:
    assert field in OTHER, f"add a change of {field} to this test, and look at what fails"
    return BASE.replace(**OTHER[field])


@pytest.mark.parametrize("field", FIELDS)
def test_documents_keep_the_field(field: str) -> None:
    plan = plan_of(runs_of(changed(field)))
    loaded = documents.loads(documents.dumps(plan), Plan)
    assert (loaded, hash(loaded)) == (plan, hash(plan))
    assert documents.dumps(plan) != documents.dumps(plan_of(runs_of(BASE)))


KEYS: dict[str, tuple[Callable[[Plan], Hashable], set[str]]] = {
    "digest of a trial": (plan_digest, set()),
    "plan itself": (lambda plan: plan, set()),
    # A trial of the one says what the other takes: they differ in seconds by less than a trial measures.
    "shape of a plan": (plan_shape, {"order", "sequence_parallel", "keep_gathered_weights"}),
    # Recompute is counted in blocks, and ranks say which devices are a tensor group.
    "shape for trainers": (shape_of, set()),
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("key", KEYS)
def test_key_tells_plans_apart(key: str, field: str) -> None:
    key_of, indifferent = KEYS[key]
    other, base = plan_of(runs_of(changed(field))), plan_of(runs_of(BASE))
    if key == "shape for trainers" and field == "recompute":
        other = plan_of(runs_of(BASE, 0, 1), runs_of(changed(field), 1, LAYERS - 2), runs_of(BASE, LAYERS - 1, 1))
    assert (key_of(other) == key_of(base)) == (field in indifferent)


@pytest.mark.parametrize("field", FIELDS)
def test_interchangeable_devices_do_not_hide_the_field(field: str, problem: Problem) -> None:
    key = DeviceSymmetry(problem.cluster).canonical_key
    assert key(plan_of(runs_of(changed(field)))) != key(plan_of(runs_of(BASE)))


@pytest.mark.parametrize("field", FIELDS)
def test_shape_for_trainers_is_the_plan_again(field: str) -> None:
    """A shape has the tensor degree innermost, and recomputes blocks alone."""
    plan = plan_of(runs_of(changed(field)))
    shape = shape_of(plan)
    if field == "recompute":
        assert shape is None, "embedding and head are never recomputed"
        return
    assert shape is not None
    (run,) = shape.plan().stages[0].layers
    assert run.strategy == changed(field).replace(order=RankOrder.TENSOR_INNER)


def of_blocks(base: Strategy, change: dict[str, Any]) -> Plan:
    """Return the plan with a field of the base changed, recompute in blocks alone, as trainers have it."""
    other = base.replace(**change)
    if not other.recompute:
        return plan_of(runs_of(other))
    return plan_of(runs_of(base, 0, 1), runs_of(other, 1, LAYERS - 2), runs_of(base, LAYERS - 1, 1))


PLAN_READERS = {name for name, target in TARGETS.items() if target.capabilities.every_plan}
WITHOUT_TENSOR = {name for name, target in TARGETS.items() if not target.capabilities.tensor}
LOST = {
    **dict.fromkeys(
        ("tensor", "data", "order"), WITHOUT_TENSOR
    ),  # these plans differ in all three by the tensor degree
    "sequence_parallel": {"deepspeed", "accelerate", *WITHOUT_TENSOR},
    "keep_gathered_weights": set(TARGETS) - PLAN_READERS,
}
"""Trainers that lack a field, which `losses` says."""


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", TARGETS)
def test_export_says_the_field_unless_the_trainer_lacks_it(name: str, field: str) -> None:
    target, said = TARGETS[name], set[bool]()
    degrees = (BASE, Strategy(1, 4)) if field in {"sharding", "recompute"} else (BASE,)
    bases = [base.replace(sharding=sharding) for base in degrees for sharding in Sharding]
    changes = [{"sharding": sharding} for sharding in Sharding] if field == "sharding" else [OTHER[field]]
    for base, change in product(bases, changes):
        plans = plan_of(runs_of(base)), of_blocks(base, change)
        has_effect = base.replace(**change).effective != base.effective
        if has_effect and all(is_expressible(plan, target.capabilities) for plan in plans):
            first, second = (target.files(ExportRequest(plan)) for plan in plans)
            said.add(first != second)
    assert said == (set() if name in LOST.get(field, set()) else {True})


@pytest.mark.parametrize("field", FIELDS)
def test_nearest_plan_keeps_the_field_that_its_trainer_has(field: str) -> None:
    """Its ranks are in the order of trainers, with the tensor groups that the plan has."""
    plan = replace(of_blocks(BASE, OTHER[field]), schedule=Schedule.GPIPE)
    (pipeline,), one_node = plan.pipelines, tuple(Device("node", slot) for slot in range(len(DEVICES)))
    stages = tuple(replace(stage, devices=one_node) for stage in pipeline.stages)
    nearest = nearest_plan(
        replace(plan, pipelines=(replace(pipeline, stages=stages),)), TARGETS["megatron"].capabilities
    )
    assert nearest.schedule is not Schedule.GPIPE, "Megatron lacks it, so the plan is not the nearest one itself"
    (stage,) = nearest.stages
    found = stage.layers[len(stage.layers) // 2].strategy
    kept = changed(field).replace(keep_gathered_weights=False)
    assert found == kept.replace(order=RankOrder.TENSOR_INNER)
    assert found.tensor_groups(stage.devices) == kept.tensor_groups(one_node)


SHORTHAND = {
    "tensor": "tp1 dp4 mb1 zero3",
    "data": "tp1 dp4 mb1 zero3",
    "sharding": "tp2 dp2 mb2 zero1",
    "recompute": "tp2 dp2 mb2 zero3 recompute",
    "keep_gathered_weights": "tp2 dp2 mb2 zero3, kept",
}
ELSEWHERE = {
    "order": (("tensor_inner", "data_inner"), "in a file"),
    "sequence_parallel": (("sequence_parallel", "sp"), "the runtime decides"),
}
"""Words that a shorthand does not have, and where their error says that the field is set."""


@pytest.mark.parametrize("field", FIELDS)
def test_shorthand_says_the_field_or_where_it_is_set(field: str) -> None:
    if field in SHORTHAND:
        plan = plan_of_shorthand(SHORTHAND[field], DEVICES, LAYERS, 8)
        assert plan.stages == of_blocks(BASE, OTHER[field]).stages
        return
    words, place = ELSEWHERE[field]
    for word in words:
        with pytest.raises(ValueError, match=place):
            plan_of_shorthand(f"tp2 dp2 mb2 zero3 {word}", DEVICES, LAYERS, 8)


@pytest.fixture(scope="module")
def problem(make_problem: Callable[..., Problem]) -> Problem:
    return make_problem(layers=LAYERS - 2)


@pytest.mark.parametrize("field", FIELDS)
def test_stage_taken_apart_and_put_together_keeps_the_field(field: str, problem: Problem) -> None:
    """Sequence parallelism comes back with the runtime's choices; moves between degrees cannot keep it."""
    (stage,) = plan_of(runs_of(changed(field))).stages
    again = StageConfig.of(stage).to_stage(0)
    (run,) = again.layers
    if field == "sequence_parallel":
        chosen = with_runtime_choices(plan_of(runs_of(BASE)), problem.cost_context)
        assert with_runtime_choices(plan_of(run), problem.cost_context) == chosen
    else:
        assert again == stage


@pytest.mark.parametrize("field", FIELDS)
def test_inserted_stage_keeps_the_field(
    field: str, make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster]
) -> None:
    """Its devices are replicas alone, so that their order says nothing and no sequence is divided."""
    problem = make_problem(make_cluster([("fast", 2)] * 3), layers=LAYERS - 2)
    (pipeline,) = editable_pipelines(plan_of(runs_of(changed(field))), problem)
    plans = [move() for move in insert_or_remove_stages([pipeline])]
    assert {len(plan.stages) for plan in plans} == {2}
    for run in (run for plan in plans for stage in plan.stages for run in stage.layers):
        chosen = changed(field).replace(tensor=run.strategy.tensor, order=run.strategy.order, sequence_parallel=False)
        assert run.strategy.effective == chosen.with_replicas(run.strategy.data).effective


NEAREST = sorted({field.name for field in fields(NearestDegrees)} & set(FIELDS))


@pytest.mark.parametrize("field", NEAREST)
def test_degrees_nearest_to_operator_shardings_keep_what_they_have(field: str) -> None:
    said = {name: getattr(changed(field), name) for name in NEAREST}
    assert NearestDegrees(first=0, count=LAYERS, exact=True, **said).layer_run(4) == runs_of(Strategy(**said))


def test_decision_trees_of_galvatron_are_strategies_of_their_own() -> None:
    trees = decision_trees(8)
    found = {strategy_of_tree(tree, recompute=recompute) for tree in trees for recompute in (False, True)}
    assert len(found) == 2 * len(trees)
    assert {field for field in FIELDS if len({getattr(one, field) for one in found}) > 1} == {*NEAREST, "recompute"}


@pytest.mark.parametrize("field", FIELDS)
def test_plans_adapted_to_other_devices_keep_the_field(field: str) -> None:
    (stage,) = plan_of(runs_of(changed(field))).stages
    (run,) = with_layer_counts((stage,), (LAYERS - 1,))[0].layers
    assert run.strategy == changed(field)
    if run.strategy.data > 1:
        kept = shrink_to_devices(stage, frozenset(DEVICES[:3]))
        assert kept is not None
        assert kept.layers[0].strategy == changed(field).with_replicas(kept.layers[0].strategy.data)


@pytest.mark.parametrize("field", FIELDS)
def test_costs_that_plans_share_are_not_those_of_another_field(field: str, problem: Problem) -> None:
    plans = [plan_of(runs_of(one)) for one in (BASE, changed(field))]
    plans += [plan_of(runs_of(BASE, 0, 7), runs_of(changed(field), 7, 7))]
    shared = problem.cost_context
    for plan in (*plans, *reversed(plans)):
        fresh = replace(shared)
        assert estimate_with_context(plan, shared) == estimate_with_context(plan, fresh)
        assert estimate_seconds(plan, shared) == estimate_seconds(plan, fresh)
