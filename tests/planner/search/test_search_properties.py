"""Properties of every search: names and units change nothing, and no better plan was pruned."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from changed_problems import renamed, slower
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.cluster import Cluster, Device, Node
from trainwright.cost.estimate import estimate_with_context
from trainwright.cost.network import node_classes
from trainwright.search import NoFeasiblePlan, Problem, run
from trainwright.search.annealing import domino_placement
from trainwright.search.candidates import DeviceSymmetry, drop_equivalent
from trainwright.search.degrees import micro_batch_sizes
from trainwright.search.preference.error_band_order import TOLERANCE
from trainwright.search.uniform.plan_space import UniformPlanSpace, open_degrees

MakeCluster = Callable[..., Cluster]
MakeProblem = Callable[..., Problem]
Random = random.Random

nodes = st.lists(st.tuples(st.sampled_from(["fast", "slow"]), st.integers(1, 3)), min_size=1, max_size=4)
randoms = st.randoms(use_true_random=False)
planners = pytest.mark.parametrize("planner", ["amp", "amp-annealing", "megatron", "random"])
few = examples(8)


@pytest.fixture(scope="module")
def draw(make_problem: MakeProblem, make_cluster: MakeCluster) -> Callable[..., Problem]:
    """Return a function that draws problems whose links between nodes all differ."""

    def drawn(speeds: list[tuple[str, int]], batch: int, pick: Random, memory: int | None = None) -> Problem:
        cluster = make_cluster(speeds, memory=memory)
        links = tuple(
            replace(link, bandwidth_bytes_per_second=link.bandwidth_bytes_per_second * pick.uniform(0.2, 3))
            for link in cluster.links
        )
        return make_problem(replace(cluster, links=links), layers=pick.randint(2, 6), batch=batch)

    return drawn


def best(planner: str, problem: Problem) -> float | None:
    try:
        return run(planner, problem, top=1)[0].estimate.iteration_seconds
    except NoFeasiblePlan:
        return None


@planners
@few
@given(speeds=nodes, batch=st.sampled_from([4, 6, 8]), pick=randoms)
def test_names_and_order_of_nodes_change_nothing(
    *, draw: Callable[..., Problem], planner: str, speeds: list[tuple[str, int]], batch: int, pick: Random
) -> None:
    problem = draw(speeds, batch, pick)
    before, after = best(planner, problem), best(planner, renamed(problem, pick))
    assert (before is None) == (after is None)
    if before is not None:
        assert after == pytest.approx(before, rel=1e-9)


@planners
@few
@given(speeds=nodes, batch=st.sampled_from([4, 6, 8]), pick=randoms)
def test_answer_doubles_when_all_times_double(
    *, draw: Callable[..., Problem], planner: str, speeds: list[tuple[str, int]], batch: int, pick: Random
) -> None:
    problem = draw(speeds, batch, pick)
    before, after = best(planner, problem), best(planner, slower(problem, 2.0))
    assert (before is None) == (after is None)
    if before is not None:
        assert after == pytest.approx(2 * before, rel=1e-6)


@planners
@few
@given(
    speeds=nodes,
    batch=st.sampled_from([4, 8]),
    memory=st.sampled_from([8 * 2**20, 24 * 2**20, None]),
    top=st.integers(1, 4),
    pick=randoms,
)
def test_lazy_costing_finds_the_same_best_plans(
    *,
    draw: Callable[..., Problem],
    planner: str,
    speeds: list[tuple[str, int]],
    batch: int,
    memory: int | None,
    top: int,
    pick: Random,
) -> None:
    problem = draw(speeds, batch, pick, memory)
    try:
        everything = run(planner, problem)
    except NoFeasiblePlan:
        with pytest.raises(NoFeasiblePlan):
            run(planner, problem, top=top)
        return
    few = [candidate.estimate.iteration_seconds for candidate in run(planner, problem, top=top)]
    shapes = [candidate.estimate.iteration_seconds for candidate in drop_equivalent(everything, TOLERANCE)]
    assert few == shapes[: len(few)]
    assert 0 < len(few) <= top


@planners
@few
@given(speeds=nodes, batch=st.sampled_from([4, 8]), memory=st.sampled_from([8 * 2**20, None]), pick=randoms)
def test_candidates_are_feasible_distinct_and_in_order(
    *,
    draw: Callable[..., Problem],
    planner: str,
    speeds: list[tuple[str, int]],
    batch: int,
    memory: int | None,
    pick: Random,
) -> None:
    problem = draw(speeds, batch, pick, memory)
    try:
        candidates = run(planner, problem)
    except NoFeasiblePlan:
        return
    assert all(candidate.estimate.feasible for candidate in candidates)
    roles = DeviceSymmetry(problem.cluster)
    assert len({roles.canonical_key(candidate.plan) for candidate in candidates}) == len(candidates)
    seconds = [candidate.estimate.iteration_seconds for candidate in candidates]
    assert seconds == sorted(seconds)
    assert all(sorted(candidate.plan.devices) == sorted(problem.devices) for candidate in candidates)


@examples(60)
@given(
    speeds=nodes,
    batch=st.sampled_from([4, 6, 8, 24]),
    pick=randoms,
    seed=st.integers(0, 2**32),
    hides=st.booleans(),
    chunks=st.sampled_from([1, 2, 3]),
)
def test_the_bound_is_never_above_the_replay(
    *,
    draw: Callable[..., Problem],
    speeds: list[tuple[str, int]],
    batch: int,
    pick: Random,
    seed: int,
    hides: bool,
    chunks: int,
) -> None:
    problem = draw(speeds, batch, pick)
    problem = replace(problem, runtime=replace(problem.runtime, hides_transfers=hides, virtual_stages=chunks))
    drafting = UniformPlanSpace.of(problem)
    layers = len(problem.model.layers)
    for degrees in open_degrees(problem):
        for rows in micro_batch_sizes(batch, degrees.data)[:2]:
            placement = domino_placement(drafting.order.node_numbers, degrees, np.random.default_rng(seed))
            ends = (*sorted(pick.sample(range(1, layers), degrees.pipeline - 1)), layers)
            plan = drafting.plan(placement, rows, ends)
            bound = drafting.bounds.seconds(drafting.tables.place_stages(placement), rows, ends)
            assert 0 < bound <= estimate_with_context(plan, problem.cost_context).iteration_seconds


def test_plans_are_equal_when_equal_devices_are_swapped(
    make_problem: MakeProblem, make_cluster: MakeCluster, make_plan: Callable[..., object]
) -> None:
    problem = make_problem(make_cluster((("fast", 2), ("slow", 2), ("fast", 2))), layers=2, batch=4)
    a0, a1, s0, s1, b0, b1 = problem.cluster.devices

    def same(*devices: Device) -> bool:
        plans = (
            make_plan(problem, (2, 2), data=3, rows=1, devices=chosen) for chosen in ((a0, a1, b0, b1, s0, s1), devices)
        )
        one, other = (DeviceSymmetry(problem.cluster).canonical_key(plan) for plan in plans)  # type: ignore[arg-type]
        return one == other

    problem = replace(problem, global_batch_size=3)
    assert same(b0, b1, a0, a1, s0, s1)  # the two fast nodes
    assert same(a1, a0, b1, b0, s1, s0)  # slots
    assert not same(a0, a1, s0, s1, b0, b1)
    assert not same(a0, b0, a1, b1, s0, s1)


def test_nodes_are_interchangeable_only_when_all_links_are_equal(make_cluster: MakeCluster) -> None:
    cluster = make_cluster((("fast", 2),) * 4)
    assert node_classes(cluster) == (0, 0, 0, 0)
    one_slower = tuple(
        replace(link, bandwidth_bytes_per_second=1e6) if (link.source, link.target) == ("node-1", "node-2") else link
        for link in cluster.links
    )
    assert node_classes(replace(cluster, links=one_slower)) == (0, 1, 2, 2)
    more = (*cluster.nodes[:3], Node("node-4", cluster.nodes[3].accelerator, 3))
    assert node_classes(replace(cluster, nodes=more)) == (0, 0, 0, 3)
