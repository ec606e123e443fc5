"""Among about equally good plans the simpler one is preferred, and the cost of that is reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.cluster import Cluster, Link, Port
from trainwright.plan import LayerRun, Pipeline, Plan, Stage, split_rows
from trainwright.search import Candidate, Limits, Objective, Preference, Problem, run
from trainwright.search.candidates import DeviceSymmetry, candidate_of
from trainwright.search.preference.candidate_order import add_distinct_complexities, order_by_preference, with_even_rows
from trainwright.search.preference.link_noise import MAX_GAP_TOLERANCES, MAX_WIDTH_TOLERANCES, snap_links
from trainwright.search.preference.simplicity import Complexity, order_by_complexity
from trainwright.strategy import Sharding, Strategy

MakeProblem = Callable[..., Problem]
MakeCluster = Callable[..., Cluster]
MakePlan = Callable[..., Plan]


@pytest.fixture(scope="module")
def problem(make_problem: MakeProblem) -> Problem:
    return make_problem()


def with_seconds(candidate: Candidate, plan: Plan, seconds: float) -> Candidate:
    return Candidate(plan, replace(candidate.estimate, iteration_seconds=seconds))


def with_rows(plan: Plan, stage: int, rows: tuple[int, ...]) -> Plan:
    pipeline = plan.pipelines[0]
    stages = list(pipeline.stages)
    stages[stage] = replace(stages[stage], layers=(replace(stages[stage].layers[0], rows=rows),))
    return replace(plan, pipelines=(replace(pipeline, stages=tuple(stages)),))


def test_simpler_of_two_near_plans_comes_first_with_its_trade(problem: Problem, make_plan: MakePlan) -> None:
    plain = make_plan(problem, (7, 7), data=4, rows=2)
    uneven = with_rows(plain, 0, (3, 2, 2, 1))
    any_candidate = candidate_of(problem, plain)
    fast, slow = with_seconds(any_candidate, uneven, 1.0), with_seconds(any_candidate, plain, 1.008)
    order, trade = order_by_complexity([fast, slow], 0.03, problem.cluster)
    assert [one.plan for one in order] == [plain, uneven]
    assert trade is not None
    assert trade.describe() == "0.8% slower by the estimate than the fastest, which needs uneven rows in 1 stage"
    equal = replace(trade, worse_by_ratio=0.0004)
    assert equal.describe() == "as fast by the estimate as the fastest, which needs uneven rows in 1 stage"
    assert order_by_complexity([slow, fast], 0.0, problem.cluster) == ([fast, slow], None)
    assert order_by_complexity([slow, fast], 0.007, problem.cluster)[0][0].plan == uneven


def test_simplest_best_plan_has_no_trade(problem: Problem, make_plan: MakePlan) -> None:
    plain = make_plan(problem, (7, 7), data=4, rows=2)
    any_candidate = candidate_of(problem, plain)
    candidates = [
        with_seconds(any_candidate, with_rows(plain, 1, (1, 3, 2, 2)), 1.0),
        with_seconds(any_candidate, plain, 1.0),
    ]
    order, trade = order_by_complexity(candidates, 0.03, problem.cluster)
    assert order[0].plan == plain
    assert trade is None


def test_kept_plan_comes_before_simpler_plans(problem: Problem, make_plan: MakePlan) -> None:
    plain = make_plan(problem, (7, 7), data=4, rows=2)
    running = with_rows(plain, 0, (3, 2, 2, 1))
    any_candidate = candidate_of(problem, plain)
    candidates = [with_seconds(any_candidate, plain, 1.0), with_seconds(any_candidate, running, 1.02)]
    assert order_by_complexity(candidates, 0.03, problem.cluster, is_running=running.__eq__)[0][0].plan == running
    assert order_by_complexity(candidates, 0.01, problem.cluster, is_running=running.__eq__)[0][0].plan == plain


@examples(60)
@given(
    seconds=st.lists(st.floats(0.5, 2.0), min_size=1, max_size=8),
    tolerance=st.floats(0.0, 0.5),
    odd=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_preferred_plan_is_within_the_tolerance_and_simplest(
    seconds: list[float], tolerance: float, odd: list[bool], make_problem: MakeProblem, make_plan: MakePlan
) -> None:
    problem = make_problem()
    plain = make_plan(problem, (7, 7), data=4, rows=2)
    uneven = with_rows(plain, 0, (3, 2, 2, 1))
    base = candidate_of(problem, plain)
    given_ones = [with_seconds(base, uneven if o else plain, s) for s, o in zip(seconds, odd, strict=False)]
    order, trade = order_by_complexity(given_ones, tolerance, problem.cluster)
    assert sorted(map(id, order)) == sorted(map(id, given_ones))
    least = min(seconds)
    first = order[0]
    assert first.estimate.iteration_seconds <= least * (1 + tolerance)
    near = [one for one in given_ones if one.estimate.iteration_seconds <= least * (1 + tolerance)]
    if tolerance > 0:
        assert Complexity.of(first.plan, problem.cluster) == min(
            Complexity.of(one.plan, problem.cluster) for one in near
        )
    assert (trade is None) == (first.estimate.iteration_seconds == least)


def test_simplicity_counts_stages_types_and_degrees(make_problem: MakeProblem, make_cluster: MakeCluster) -> None:
    problem = make_problem(make_cluster((("fast", 4), ("slow", 2), ("fast", 2))), layers=12, batch=16)
    a, b, c, d, e, f, g, h = problem.cluster.devices
    first = Pipeline(
        2,
        6,
        (
            Stage((a, b), (LayerRun(0, 4, Strategy(1, 2), (4, 2)),)),
            Stage((c, d), (LayerRun(4, 9, Strategy(2, 1, recompute=True), (6,)),)),
            Stage((g, h), (LayerRun(13, 1, Strategy(2, 1, recompute=True), (6,)),)),
        ),
    )
    second = Pipeline(1, 4, (Stage((e, f), (LayerRun(0, 14, Strategy(1, 2, sharding=Sharding.ZERO1), (2, 2)),)),))
    plan = Plan(14, 16, (first, second))
    found = Complexity.of(plan, problem.cluster)
    assert found == Complexity(
        operator_stages=0,
        stage_types=3,
        pipelines=2,
        degrees=2,
        uneven_stages=1,
        recomputed_layers=10,
        sharded_layers=14,
        devices=8,
    )
    plain = Complexity.of(Plan(14, 16, (Pipeline(4, 4, second.stages),)), problem.cluster)
    assert found.describe_excess(plain)[:3] == (
        "3 types of stage in place of 1",
        "2 pipelines in place of 1",
        "2 pairs of degrees in place of 1",
    )
    assert plain.describe_excess(found) == ()


def test_evening_rows_changes_only_rows(problem: Problem, make_plan: MakePlan) -> None:
    plain = make_plan(problem, (1, 11, 2), data=2, rows=4)
    assert with_even_rows(with_rows(plain, 1, (5, 3))) == plain
    assert with_even_rows(plain) is plain
    in_three = Plan(
        14, 16, (Pipeline(2, 8, (Stage(problem.cluster.devices[:3], (LayerRun(0, 14, Strategy(1, 3), (2, 5, 1)),)),)),)
    )
    assert with_even_rows(in_three).pipelines[0].stages[0].layers[0].rows == (3, 3, 2)


@given(st.integers(1, 60), st.integers(1, 12))
def test_even_parts_differ_by_one(total: int, parts: int) -> None:
    found = split_rows(total, parts)
    assert sum(found) == total
    assert max(found) - min(found) <= 1


def noisy_links(cluster: Cluster, spread: float, seed: int) -> Cluster:
    generator = np.random.default_rng(seed)
    links = tuple(
        Link(
            link.source,
            link.target,
            link.latency_seconds * float(generator.lognormal(0, spread)),
            link.bandwidth_bytes_per_second * float(generator.lognormal(0, spread)),
        )
        for link in cluster.links
    )
    return replace(cluster, links=links)


def test_levelling_equalises_noisy_links_only(make_cluster: MakeCluster) -> None:
    true = make_cluster()
    slow = tuple(
        replace(link, bandwidth_bytes_per_second=link.bandwidth_bytes_per_second / 2)
        if {link.source, link.target} == {"node-1", "node-2"}
        else link
        for link in true.links
    )
    found = snap_links(noisy_links(replace(true, links=slow), 0.01, 3), 0.03)
    between = {
        (k.bandwidth_bytes_per_second, {k.source, k.target} == {"node-1", "node-2"})
        for k in found.links
        if k.source != k.target
    }
    assert len(between) == 2
    assert math.isclose(max(b for b, _ in between) / min(b for b, _ in between), 2, rel_tol=0.03)
    assert snap_links(true, 0.03) == true
    assert snap_links(true, 0.0) is true


def test_link_noise_does_not_choose_among_equal_nodes(problem: Problem) -> None:
    def chosen(tolerance: float) -> set[Plan]:
        measured = [replace(problem, cluster=noisy_links(problem.cluster, 0.01, seed)) for seed in range(4)]
        return {run("amp", replace(one, preference=Preference(tolerance)), top=1)[0].plan for one in measured}

    assert len(chosen(0.0)) > 1
    assert len(chosen(0.05)) == 1


@given(bandwidths=st.lists(st.floats(1e8, 1e11), min_size=2, max_size=6), tolerance=st.floats(0.005, 0.1))
def test_levelled_ports_stay_near_what_was_measured(
    bandwidths: list[float], tolerance: float, make_cluster: MakeCluster
) -> None:
    base = make_cluster((("fast", 2),) * len(bandwidths))
    nodes = tuple(
        replace(node, network=Port(1e-5, bandwidth), inside=Port(1e-6, 1e11))
        for node, bandwidth in zip(base.nodes, bandwidths, strict=True)
    )
    cluster = replace(base, nodes=nodes, links=())
    found = snap_links(cluster, tolerance)
    for before, after in zip(cluster.nodes, found.nodes, strict=True):
        assert before.network is not None
        assert after.network is not None
        ratio = after.network.bandwidth_bytes_per_second / before.network.bandwidth_bytes_per_second
        assert 1 / (1 + MAX_WIDTH_TOLERANCES * tolerance) - 1e-9 <= ratio <= 1 + MAX_WIDTH_TOLERANCES * tolerance + 1e-9
        assert after.inside == before.inside
    ascending = sorted(bandwidths)
    if all(high > low * (1 + MAX_GAP_TOLERANCES * tolerance) for low, high in pairwise(ascending)):
        assert found is cluster


def noisy(problem: Problem, seed: int, spread: float = 0.05) -> Problem:
    """Scale every profile time, bandwidth and latency by its own log-normal factor."""
    generator = np.random.default_rng(seed)
    layers = tuple(
        replace(
            layer,
            forward_seconds=layer.forward_seconds * float(generator.lognormal(0, spread)),
            backward_seconds=layer.backward_seconds * float(generator.lognormal(0, spread)),
        )
        for layer in problem.profiles.layers
    )
    return replace(
        problem,
        profiles=replace(problem.profiles, layers=layers),
        cluster=noisy_links(problem.cluster, spread, seed),
    )


def test_noise_within_the_tolerance_does_not_choose(problem: Problem, make_plan: MakePlan) -> None:
    plain = make_plan(problem, (7, 7), data=4, rows=2)
    true = {with_rows(plain, 0, (3, 1, 2, 2)): 1.0, plain: 1.005, with_rows(plain, 1, (1, 3, 2, 2)): 1.01}
    any_candidate = candidate_of(problem, plain)
    generator = np.random.default_rng(1)
    free, steady = [], []
    for _ in range(40):
        candidates = [
            with_seconds(any_candidate, plan, seconds * float(generator.lognormal(0, 0.02)))
            for plan, seconds in true.items()
        ]
        free.append(order_by_complexity(candidates, 0.0, problem.cluster)[0][0].plan)
        steady.append(order_by_complexity(candidates, 0.05, problem.cluster)[0][0].plan)
    assert changes(steady, problem) < changes(free, problem) / 4
    assert np.mean([true[plan] for plan in steady]) <= 1.01


def changes(plans: list[Plan], problem: Problem) -> int:
    """Count the plans that differ from their predecessor by more than interchangeable devices."""
    keys = [DeviceSymmetry(problem.cluster).canonical_key(plan) for plan in plans]
    return sum(one != other for one, other in pairwise(keys))


def test_running_plan_stays_over_repeated_measurements_while_it_is_good(
    make_problem: MakeProblem, make_cluster: MakeCluster
) -> None:
    tolerance = 0.05
    true = make_problem(make_cluster((("fast", 2), ("fast", 2), ("slow", 2))), layers=24, batch=16)
    best = run("amp", true, top=1)[0].estimate.iteration_seconds
    free: list[Plan] = []
    kept: list[Plan] = []
    for seed in range(8):
        measured = noisy(true, seed)
        free.append(run("amp", measured, top=1)[0].plan)
        preference = Preference(tolerance, kept[-1] if kept else None)
        kept.append(run("amp", replace(measured, preference=preference), top=1)[0].plan)
    assert changes(kept, true) < changes(free, true) / 2
    seconds = [candidate_of(true, plan).estimate.iteration_seconds for plan in kept]
    assert float(np.mean(seconds)) <= best * (1 + tolerance)


@pytest.mark.parametrize("planner", ["amp", "megatron"])
def test_every_planner_applies_and_reports_the_preference(problem: Problem, planner: str) -> None:
    plain = run(planner, problem)
    found = run(planner, replace(problem, preference=Preference(0.1)))
    least = plain[0].estimate.iteration_seconds
    assert found[0].estimate.iteration_seconds <= least * 1.1
    assert Complexity.of(found[0].plan, problem.cluster) <= Complexity.of(plain[0].plan, problem.cluster)
    if found[0].estimate.iteration_seconds > least:
        assert found[0].traded is not None
        assert "slower by the estimate than the fastest" in found[0].traded
    assert all(one.traded is None for one in [*found[1:], *plain])


def test_shortened_candidates_keep_the_first_and_the_first_of_every_kind(problem: Problem, make_plan: MakePlan) -> None:
    plain = make_plan(problem, (7, 7), data=4, rows=2)
    uneven = with_rows(plain, 0, (3, 2, 2, 1))
    base = candidate_of(problem, plain)
    fastest_first = [with_seconds(base, plan, 1.0 + n) for n, plan in enumerate([uneven] * 3 + [plain] * 3)]
    assert add_distinct_complexities(fastest_first, 2, problem) == [*fastest_first[:2], fastest_first[3]]
    assert add_distinct_complexities(fastest_first, 9, problem) == fastest_first


def test_even_rows_are_tried_and_no_plan_twice(problem: Problem, make_plan: MakePlan) -> None:
    plain = make_plan(problem, (7, 7), data=4, rows=2)
    devices = problem.cluster.devices
    turned = make_plan(problem, (7, 7), data=4, rows=2, devices=(*devices[2:4], *devices[:2], *devices[4:]))
    tolerant = replace(problem, preference=Preference(0.9))
    uneven = candidate_of(problem, with_rows(plain, 1, (1, 3, 2, 2)))
    assert [one.plan for one in order_by_preference([uneven], tolerant)] == [plain, uneven.plan]
    assert [
        one.plan for one in order_by_preference([candidate_of(problem, one) for one in (plain, turned)], tolerant)
    ] == [plain]


def test_without_a_preference_nothing_changes(problem: Problem) -> None:
    candidates = run("megatron", problem)
    assert order_by_preference(candidates, problem) == candidates


def test_trade_names_a_higher_price(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    accelerators = tuple(replace(one, price_per_hour=1.0) for one in problem.cluster.accelerators)
    priced = replace(
        problem,
        cluster=replace(problem.cluster, accelerators=accelerators),
        limits=Limits(objective=Objective.COST),
        preference=Preference(0.9),
    )
    uneven = with_rows(make_plan(problem, (14,), data=2, rows=8), 0, (9, 7))
    wide = make_plan(problem, (14,), data=2, rows=8, devices=problem.cluster.devices[::2][2:])
    costed = [candidate_of(priced, plan) for plan in (uneven, wide)]
    words = order_by_preference(costed, priced)[0].traded
    assert words is None or "dearer by the estimate than the cheapest" in words


@pytest.mark.parametrize(
    ("preference", "message"),
    [
        ({"tolerance": -0.1}, "tolerance must be 0 or more and below 1"),
        ({"tolerance": math.nan}, "tolerance must be 0 or more and below 1"),
        ({"keep_weight": -1.0}, "keep_weight must be finite and at least 0"),
        ({"keep_weight": math.inf}, "keep_weight must be finite"),
    ],
)
def test_invalid_preferences_are_refused(preference: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preference(**preference)  # type: ignore[arg-type]
