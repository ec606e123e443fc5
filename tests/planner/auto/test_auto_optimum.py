"""`auto` finds the fastest plan of one pipeline, or a faster one, checked by enumeration of its whole space."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice

import pytest
from auto_instances import instance
from auto_oracle import PlanSpace, compositions, fastest
from nightly import quick_first

from trainwright.cost.estimate import estimate_with_context
from trainwright.cost.work_bound import work_bound_seconds
from trainwright.plan import Plan
from trainwright.search import SEARCHES, NoFeasiblePlan, Problem, SearchControl, run
from trainwright.search.candidates import DeviceSymmetry

INSTANCES = 40
MAX_PLANS = 700


def mixes_degrees(plan: Plan) -> bool:
    """Return whether layers of one stage differ in degrees or rows, which enumeration leaves out."""
    return any(
        len({(run.strategy.tensor, run.rows) for run in stage.layers}) > 1
        for pipeline in plan.pipelines
        for stage in pipeline.stages
    )


@pytest.mark.parametrize("seed", quick_first(range(INSTANCES), range(0, INSTANCES, 3)))
def test_auto_is_as_fast_as_every_plan_of_one_pipeline(seed: int) -> None:
    """Several pipelines are drafted by kinds of nodes alone: on a few equal devices some of them are faster."""
    problem = instance(seed, MAX_PLANS)
    least, plan = fastest(problem)
    assert work_bound_seconds(problem.cost_context, problem.nodes, problem.global_batch_size) <= least
    if plan is None:
        with pytest.raises(NoFeasiblePlan):
            SEARCHES["auto"](problem, SearchControl(), 1)
        return
    found = SEARCHES["auto"](problem, SearchControl(), 1)[0]
    assert found.estimate.feasible
    assert found.estimate == estimate_with_context(found.plan, problem.cost_context)
    seconds = found.estimate.iteration_seconds
    if not mixes_degrees(found.plan):
        assert seconds >= least * (1 - 1e-9), f"{found.plan}\n{plan}"
    if len(plan.pipelines) > 1:
        least, plan = fastest(problem, most_pipelines=1)
    assert seconds <= least * (1 + 1e-9), f"{found.plan}\n{plan}"


@pytest.mark.parametrize("seed", range(100, 106))
def test_enumeration_yields_every_plan_once(seed: int) -> None:
    problem = instance(seed, MAX_PLANS)
    space, roles = PlanSpace(problem), DeviceSymmetry(problem.cluster)
    plans = list(space.plans())
    assert len(plans) == space.size()
    assert len({roles.canonical_key(plan) for plan in plans}) == len(plans)


@pytest.mark.parametrize("seed", quick_first(range(100, 112), range(100, 104)))
def test_no_search_beats_enumeration_inside_its_space(seed: int) -> None:
    problem = instance(seed, MAX_PLANS // 2)
    least, _ = fastest(problem)
    for search in ("amp", "megatron", "random"):
        try:
            found = run(search, problem, top=1)[0].estimate.iteration_seconds
        except NoFeasiblePlan:
            found = math.inf
        assert found >= least * (1 - 1e-9)


def test_enumeration_equals_a_small_space_listed_by_hand(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., object]
) -> None:
    """Two equal nodes of one device and two rows: one device, two stages, two replicas, a pair, or two pipelines."""
    problem = make_problem(make_cluster((("fast", 1), ("fast", 1))), layers=1, batch=2)
    choices, layers = 2, len(problem.model.layers)
    one = 2 * choices**layers  # one or two micro-batches
    two_stages = 2 * (layers - 1) * choices**layers
    replicas = (4 * choices) ** layers  # only micro-batches of two rows
    tensor = 2 * choices**layers
    two_pipelines = choices ** (2 * layers)
    assert PlanSpace(problem).size() == one + two_stages + replicas + tensor + two_pipelines
    assert all(plan.global_batch_size == 2 for plan in islice(PlanSpace(problem).plans(), 100))


def test_compositions_are_all_ways_to_share_rows() -> None:
    assert compositions(4, 2) == [(1, 3), (2, 2), (3, 1)]
    assert compositions(2, 3) == []
