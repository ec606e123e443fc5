"""Whatever copies, compares or stores plans tells two apart that differ in any one field of a strategy, or says why not."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from typing import Any

import pytest

from trainwright import documents
from trainwright.cluster import Device
from trainwright.cost.estimate import estimate_with_context
from trainwright.exports.uniform_shape import shape_of
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.search import Problem
from trainwright.search.auto.layer_rebalancing import StageConfig
from trainwright.search.candidates import DeviceSymmetry, plan_shape
from trainwright.search.galvatron.galvatron_model import estimate_seconds
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
    assert documents.loads(documents.dumps(plan), Plan) == plan
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
