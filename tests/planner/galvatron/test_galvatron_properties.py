"""Properties of Galvatron's searches: names, units and the requested number of plans change nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from changed_problems import renamed, slower
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.cluster import Cluster
from trainwright.cost.estimate import estimate_with_context
from trainwright.search import SEARCHES, NoFeasiblePlan, Problem, SearchProgress, run
from trainwright.search.candidates import DeviceSymmetry, drop_equivalent
from trainwright.search.galvatron import galvatron_model
from trainwright.search.node_order import canonical_node_order
from trainwright.search.preference.error_band_order import TOLERANCE
from trainwright.search.problem import Candidate, SearchControl

MIB = 2**20
nodes = st.lists(st.tuples(st.sampled_from(["fast", "slow"]), st.integers(1, 2)), min_size=1, max_size=4)
randoms = st.randoms(use_true_random=False)
memories = st.sampled_from([8 * MIB, 12 * MIB, None])
planners = pytest.mark.parametrize("planner", ["galvatron-base", "galvatron-bmw"])
few = examples(12)


@pytest.fixture(scope="module")
def draw(make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster]) -> Callable[..., Problem]:
    """Return a function that draws problems: links between nodes all differ, or some are equal."""

    def drawn(speeds: list[tuple[str, int]], pick: random.Random, memory: int | None = None) -> Problem:
        cluster = make_cluster(speeds, memory=memory)
        ratios = pick.choice(((0.2, 0.7, 1.0, 3.0), (0.5, 2.0)))
        links = tuple(
            replace(link, bandwidth_bytes_per_second=link.bandwidth_bytes_per_second * pick.choice(ratios))
            for link in cluster.links
        )
        return make_problem(replace(cluster, links=links), layers=pick.randint(1, 4), batch=pick.choice((4, 6)))

    return drawn


def found(planner: str, problem: Problem, top: int | None = None) -> list[Candidate]:
    try:
        return run(planner, problem, top=top)
    except NoFeasiblePlan:
        return []


def solutions(planner: str, problem: Problem) -> list[Candidate]:
    """Return the candidates of the search itself, without their variants."""
    try:
        return SEARCHES[planner](problem, SearchControl(), None)
    except NoFeasiblePlan:
        return []


def best(planner: str, problem: Problem) -> float:
    return min((candidate.estimate.iteration_seconds for candidate in found(planner, problem)), default=float("inf"))


@planners
@few
@given(speeds=nodes, memory=memories, pick=randoms)
def test_solution_does_not_depend_on_node_names_and_order(
    *,
    draw: Callable[..., Problem],
    planner: str,
    speeds: list[tuple[str, int]],
    memory: int | None,
    pick: random.Random,
) -> None:
    problem = draw(speeds, pick, memory)
    assert best(planner, renamed(problem, pick)) == pytest.approx(best(planner, problem), rel=1e-9)


@planners
@few
@given(speeds=nodes, memory=memories, ratio=st.sampled_from([2.0, 3.7]), pick=randoms)
def test_solution_seconds_scale_with_all_times(
    *,
    draw: Callable[..., Problem],
    planner: str,
    speeds: list[tuple[str, int]],
    memory: int | None,
    ratio: float,
    pick: random.Random,
) -> None:
    problem = draw(speeds, pick, memory)
    assert best(planner, slower(problem, ratio)) == pytest.approx(ratio * best(planner, problem), rel=1e-9)


@planners
@few
@given(speeds=nodes, memory=memories, top=st.integers(1, 4), pick=randoms)
def test_candidates_are_feasible_distinct_sorted_and_best_first(
    *,
    draw: Callable[..., Problem],
    planner: str,
    speeds: list[tuple[str, int]],
    memory: int | None,
    top: int,
    pick: random.Random,
) -> None:
    problem = draw(speeds, pick, memory)
    everything = found(planner, problem)
    few = found(planner, problem, top)
    assert few == drop_equivalent(everything, TOLERANCE)[: len(few)]
    assert bool(few) == bool(everything)
    roles = DeviceSymmetry(problem.cluster)
    assert len({roles.canonical_key(candidate.plan) for candidate in everything}) == len(everything)
    seconds = [candidate.estimate.iteration_seconds for candidate in everything]
    assert seconds == sorted(seconds)
    for candidate in everything:
        assert candidate.estimate.feasible
        assert candidate.estimate == estimate_with_context(candidate.plan, problem.cost_context)
        assert sorted(candidate.plan.devices) == sorted(problem.devices)


@few
@given(speeds=nodes, memory=memories, pick=randoms)
def test_bmw_includes_the_solutions_of_base(
    draw: Callable[..., Problem], speeds: list[tuple[str, int]], memory: int | None, pick: random.Random
) -> None:
    problem = draw(speeds, pick, memory)
    roles = DeviceSymmetry(problem.cluster)
    base, bmw = (
        {roles.canonical_key(candidate.plan) for candidate in solutions(planner, problem)}
        for planner in ("galvatron-base", "galvatron-bmw")
    )
    assert base <= bmw


@planners
@few
@given(speeds=nodes, memory=memories, slack=st.sampled_from([1.1, 1.5]), pick=randoms)
def test_limit_on_seconds_leaves_out_what_eq8_finds_slower(
    *,
    draw: Callable[..., Problem],
    planner: str,
    speeds: list[tuple[str, int]],
    memory: int | None,
    slack: float,
    pick: random.Random,
) -> None:
    problem = draw(speeds, pick, memory)
    every = solutions(planner, problem)
    if every:
        fastest = every[0].estimate.iteration_seconds
        limit = slack * fastest
        if galvatron_model.estimate_seconds(every[0].plan, problem.cost_context) <= limit:
            few = SEARCHES[planner](problem, SearchControl(max_seconds=limit), None)
            assert few[0].estimate.iteration_seconds <= fastest * (1 + 1e-9)
        with pytest.raises(NoFeasiblePlan, match="no plan takes less"):
            SEARCHES[planner](problem, SearchControl(max_seconds=fastest / 100), None)


@planners
def test_progress_reports_replayed_seconds(draw: Callable[..., Problem], planner: str) -> None:
    problem = draw([("fast", 2), ("slow", 2)], random.Random(1))
    told: list[SearchProgress] = []
    candidates = run(planner, problem, control=SearchControl(report=told.append))
    replayed = {candidate.estimate.iteration_seconds for candidate in candidates}
    seconds = [step.best_seconds for step in told]
    assert set(seconds) <= replayed
    assert seconds == sorted(seconds, key=lambda value: -value)
    assert seconds[-1] == min(replayed)


@examples(60)
@given(speeds=nodes, pick=randoms)
def test_canonical_node_order_does_not_depend_on_names(
    draw: Callable[..., Problem], speeds: list[tuple[str, int]], pick: random.Random
) -> None:
    problem = draw(speeds, pick)
    one, other = canonical_node_order(problem.cluster), canonical_node_order(renamed(problem, pick).cluster)
    for a, first in enumerate(one.nodes):
        assert (first.accelerator, first.devices) == (other.nodes[a].accelerator, other.nodes[a].devices)
        rows = [
            sorted(cluster.link(cluster.nodes[a].name, node.name).bandwidth_bytes_per_second for node in cluster.nodes)
            for cluster in (one, other)
        ]
        assert rows[0] == rows[1]
