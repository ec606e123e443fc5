"""Properties of every answer of `auto`: names and units change nothing, limits and budgets hold."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from changed_problems import renamed, slower
from hypothesis import Phase, given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.cluster import Cluster
from trainwright.cost.work_bound import work_bound_seconds
from trainwright.plan import Plan
from trainwright.search import SEARCHES, Candidate, Limits, NoFeasiblePlan, Problem, SearchControl, SearchProgress, run

Random = random.Random
Draw = Callable[..., Problem]

EFFORT = 0.1
"""Share of the usual evaluations: what holds of every answer holds of a quick one."""
nodes = st.lists(st.tuples(st.sampled_from(["fast", "slow"]), st.integers(1, 3)), min_size=1, max_size=3)
batches = st.sampled_from([4, 6, 8, 12])
memories = st.sampled_from([12 * 2**20, 48 * 2**20, None])
randoms = st.randoms(use_true_random=False)
few = examples(4, derandomize=True, phases=(Phase.explicit, Phase.generate))  # a search takes too long to shrink


@pytest.fixture(scope="module")
def draw(make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster]) -> Draw:
    """Return a function that draws problems: links between nodes all differ, or none does."""

    def drawn(speeds: list[tuple[str, int]], batch: int, pick: Random, memory: int | None = None) -> Problem:
        cluster = make_cluster(speeds, memory=memory)
        if pick.random() < 1 / 2:
            links = tuple(
                replace(link, bandwidth_bytes_per_second=link.bandwidth_bytes_per_second * pick.uniform(0.2, 3))
                for link in cluster.links
            )
            cluster = replace(cluster, links=links)
        return make_problem(cluster, layers=pick.randint(2, 4), batch=batch)

    return drawn


def answer(problem: Problem, control: SearchControl | None = None) -> Candidate | None:
    try:
        return SEARCHES["auto"](problem, control or SearchControl(effort=EFFORT), 1)[0]
    except NoFeasiblePlan:
        return None


def seconds(problem: Problem) -> float | None:
    found = answer(problem)
    return found.estimate.iteration_seconds if found else None


def afresh(problem: Problem) -> Problem:
    """Return the problem with empty caches."""
    return replace(problem, cluster=replace(problem.cluster), profiles=replace(problem.profiles))


@few
@given(speeds=nodes, batch=batches, memory=memories, pick=randoms)
def test_names_and_order_of_nodes_change_nothing(
    *, draw: Draw, speeds: list[tuple[str, int]], batch: int, memory: int | None, pick: Random
) -> None:
    problem = draw(speeds, batch, pick, memory)
    assert seconds(renamed(problem, pick)) == pytest.approx(seconds(problem), rel=1e-9)


@few
@given(speeds=nodes, batch=batches, memory=memories, pick=randoms)
def test_answer_doubles_when_all_times_double(
    *, draw: Draw, speeds: list[tuple[str, int]], batch: int, memory: int | None, pick: Random
) -> None:
    problem = draw(speeds, batch, pick, memory)
    before, after = seconds(problem), seconds(slower(problem, 2.0))
    assert (before is None) == (after is None)
    if before is not None:
        assert after == pytest.approx(2 * before, rel=1e-6)


@few
@given(speeds=nodes, batch=batches, memory=memories, pick=randoms)
def test_answer_is_deterministic_and_above_the_work_bound(
    *, draw: Draw, speeds: list[tuple[str, int]], batch: int, memory: int | None, pick: Random
) -> None:
    problem = draw(speeds, batch, pick, memory)
    found, again = answer(afresh(problem)), answer(afresh(problem))
    assert (found is None) == (again is None)
    if found is not None and again is not None:
        assert found.plan == again.plan
        known = found.estimate.iteration_seconds
        assert work_bound_seconds(problem.cost_context, problem.nodes, problem.global_batch_size) <= known


@few
@given(
    speeds=st.lists(st.tuples(st.sampled_from(["fast", "slow"]), st.integers(1, 3)), min_size=2, max_size=3),
    batch=batches,
    memory=memories,
    pick=randoms,
)
def test_plans_keep_to_the_limits(
    *, draw: Draw, speeds: list[tuple[str, int]], batch: int, memory: int | None, pick: Random
) -> None:
    problem = draw(speeds, batch, pick, memory)
    limits = Limits(
        max_tensor_degree=pick.choice((1, 2)),
        max_data_degree=pick.choice((1, 2)),
        max_pipeline_degree=pick.choice((1, 2)),
        memory_headroom_ratio=pick.choice((0.0, 0.4)),
        spare=(problem.cluster.nodes[0].name,),
    )
    limited = replace(problem, limits=limits)
    found = answer(limited)
    if found is None:
        return
    assert _keeps_to(found.plan, limits)
    free = 1 - limits.memory_headroom_ratio
    for device, held in found.estimate.memory_by_device:
        assert held <= problem.cluster.accelerator_of(device).memory_bytes * free
    whole = answer(problem, SearchControl())
    assert whole is not None
    assert whole.estimate.iteration_seconds <= found.estimate.iteration_seconds * (1 + 1e-9)


def _keeps_to(plan: Plan, limits: Limits) -> bool:
    runs = [run for pipeline in plan.pipelines for stage in pipeline.stages for run in stage.layers]
    return (
        max(run.strategy.tensor for run in runs) <= (limits.max_tensor_degree or 1)
        and max(run.strategy.data for run in runs) <= (limits.max_data_degree or 1)
        and max(len(pipeline.stages) for pipeline in plan.pipelines) <= (limits.max_pipeline_degree or 1)
        and not set(plan.nodes) & set(limits.spare)
    )


@few
@given(speeds=nodes, batch=batches, memory=memories, pick=randoms)
def test_answer_is_shorter_but_not_empty_when_the_budget_is_spent(
    *, draw: Draw, speeds: list[tuple[str, int]], batch: int, memory: int | None, pick: Random
) -> None:
    problem = draw(speeds, batch, pick, memory)
    hurried, patient = answer(problem, SearchControl(deadline_seconds=0.0)), answer(problem)
    assert (hurried is None) == (patient is None)
    if hurried is not None and patient is not None:
        assert hurried.estimate.feasible
        assert hurried.estimate.iteration_seconds >= patient.estimate.iteration_seconds * (1 - 1e-9)


@few
@given(speeds=nodes, batch=batches, pick=randoms)
def test_progress_never_gets_worse(*, draw: Draw, speeds: list[tuple[str, int]], batch: int, pick: Random) -> None:
    told: list[SearchProgress] = []
    found = answer(draw(speeds, batch, pick), SearchControl(report=told.append))
    best = [progress.best_seconds for progress in told if progress.best_seconds is not None]
    assert best == sorted(best, reverse=True)
    if found is not None:
        assert best
        assert best[-1] == pytest.approx(found.estimate.iteration_seconds, rel=1e-9)


def test_candidates_are_feasible_distinct_and_in_order(make_problem: Callable[..., Problem]) -> None:
    found = run("auto", make_problem(layers=4, batch=8), top=5, control=SearchControl(effort=EFFORT))
    assert 1 < len(found) <= 5
    assert all(candidate.estimate.feasible for candidate in found)
    assert len({candidate.plan for candidate in found}) == len(found)
    times = [candidate.estimate.iteration_seconds for candidate in found]
    assert times == sorted(times)
