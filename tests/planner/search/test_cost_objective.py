"""Time and cost together: the Pareto front and its plot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cluster import Cluster
from trainwright.plan import Plan
from trainwright.report.tables import HEIGHT, pareto_plot
from trainwright.search import Candidate, Limits, NoFeasiblePlan, Objective, Problem, SearchControl, run
from trainwright.search.candidates import candidate_of
from trainwright.search.cost_objective import (
    cheapest_first,
    on_growing_subclusters,
    on_subclusters_in_time,
    pareto,
    pareto_front,
    subclusters,
    subsampled,
)
from trainwright.training_run import TrainingRun

MakeProblem = Callable[..., Problem]
MakeCluster = Callable[..., Cluster]


@pytest.fixture(scope="module")
def problem(make_problem: MakeProblem, make_cluster: MakeCluster) -> Problem:
    return priced(make_problem(make_cluster((("fast", 2), ("slow", 2), ("fast", 2))), layers=6, batch=12), 3.0, 0.5)


@pytest.fixture(scope="module")
def any_candidate(problem: Problem, make_plan: Callable[..., Plan]) -> Candidate:
    return candidate_of(problem, make_plan(problem, (8,)))


def priced(problem: Problem, *prices: float | None) -> Problem:
    accelerators = tuple(
        replace(one, price_per_hour=price) for one, price in zip(problem.cluster.accelerators, prices, strict=True)
    )
    return replace(
        problem,
        cluster=replace(problem.cluster, accelerators=accelerators),
        limits=Limits(objective=Objective.PARETO),
    )


def costing(candidate: Candidate, seconds: float, price_per_hour: float | None) -> Candidate:
    return replace(
        candidate, estimate=replace(candidate.estimate, iteration_seconds=seconds), price_per_hour=price_per_hour
    )


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=20))
def test_front_has_only_undominated_plans(any_candidate: Candidate, points: list[tuple[int, int]]) -> None:
    candidates = [costing(any_candidate, float(seconds), float(price)) for seconds, price in points]

    def beats(one: Candidate, other: Candidate) -> bool:
        mine, its = both(one), both(other)
        return mine != its and mine[0] <= its[0] and mine[1] <= its[1]

    expected = {both(one) for one in candidates if not any(beats(other, one) for other in candidates)}
    found = pareto_front(candidates)
    assert [both(one) for one in found] == sorted(expected)


def both(candidate: Candidate) -> tuple[float, float]:
    assert candidate.price_per_row is not None
    return candidate.estimate.iteration_seconds, candidate.price_per_row


@pytest.mark.parametrize("planner", ["amp", "megatron", "galvatron-base"])
def test_a_front_spans_the_fastest_and_the_cheapest_of_all_parts(problem: Problem, planner: str) -> None:
    found = run(planner, problem)
    assert len(found) > 1
    everything = [one for part in subclusters(problem) for one in tried(planner, part)]
    assert both(found[0]) == min(map(both, everything))
    assert both(found[-1])[1] == min(both(one)[1] for one in everything)
    assert found == pareto_front(found)
    cost = replace(problem, limits=Limits(objective=Objective.COST))
    assert run(planner, cost, top=1)[0].price_per_row == pytest.approx(found[-1].price_per_row)


def test_a_front_ends_with_the_cheapest_plan_of_auto(problem: Problem) -> None:
    # It is seldom among the fastest plans of a subcluster.
    control = SearchControl(effort=0.2)
    front = run("auto", problem, top=4, control=control)
    cost = replace(problem, limits=Limits(objective=Objective.COST))
    assert front[-1].price_per_row <= run("auto", cost, top=1, control=control)[0].price_per_row * (1 + 1e-9)
    assert len(front) <= 4


def test_all_nodes_take_half_of_the_budget_of_a_front(problem: Problem, any_candidate: Candidate) -> None:
    asked = list[tuple[int, float]]()

    def search(part: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
        assert control.deadline_seconds is not None
        asked.append((len(part.devices), control.deadline_seconds))
        return [any_candidate]

    pareto(search, problem, SearchControl(deadline_seconds=80.0, clock=lambda: 0.0), None)
    assert asked == [(6, 40.0), (2, 20.0), (2, 80 / 3), (4, 40.0), (4, 80.0)]


FAST, SLOW, OTHER_FAST = "node-1", "node-2", "node-3"
PARTS = ({FAST}, {SLOW}, {FAST, SLOW}, {FAST, OTHER_FAST}, {FAST, OTHER_FAST, SLOW})


@pytest.mark.parametrize(
    ("prices", "left_out"),
    [
        ((2.0, 3.0, 9.0, 9.0, 9.0), {4}),  # more nodes do not pay
        ((2.0, 3.0, 9.0, 1.0, 9.0), set()),  # two fast nodes are cheaper than one
        ((2.0, None, 9.0, 9.0, 9.0), {4}),
        ((None, None, None, None, 4.0), set()),  # only all nodes have enough memory
        ((2.0, 0.0, 9.0, 9.0, 9.0), {0, 2, 3, 4}),  # below what any other can cost
    ],
)
def test_larger_parts_are_searched_where_smaller_ones_pay(
    problem: Problem, any_candidate: Candidate, prices: tuple[float | None, ...], left_out: set[int]
) -> None:
    asked = list[int]()

    def search(part: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
        asked.append(PARTS.index(set(part.nodes)))
        if (price := prices[asked[-1]]) is None:
            raise NoFeasiblePlan("too few nodes")
        return [costing(any_candidate, 3600.0, price * problem.global_batch_size)]

    found = cheapest_first(on_growing_subclusters(search, problem, SearchControl(), 1))
    assert set(asked) == {0, 1, 2, 3, 4} - left_out
    assert both(found[0])[1] == pytest.approx(min(price for price in prices if price is not None))


def test_parts_of_one_accelerator_come_first_and_none_takes_more_than_a_quarter_of_the_budget(
    problem: Problem, any_candidate: Candidate
) -> None:
    asked = list[tuple[set[str], float | None]]()

    def search(part: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
        asked.append((set(part.nodes), control.deadline_seconds))
        return [costing(any_candidate, 3600.0, 9.0)]

    on_growing_subclusters(search, problem, SearchControl(deadline_seconds=80.0, clock=lambda: 0.0), 1)
    assert asked == [({SLOW}, 20.0), ({FAST}, 20.0), ({FAST, OTHER_FAST}, 80 / 3), ({FAST, SLOW}, 40.0)]


def test_parts_that_may_be_cheapest_come_after_all_nodes_where_a_run_has_to_end_in_time(
    problem: Problem, any_candidate: Candidate
) -> None:
    timed = replace(problem, limits=Limits(objective=Objective.COST, run=TrainingRun(rows=12, within_seconds=4000.0)))
    searched = list[tuple[set[str], float | None]]()
    answers = {3: (1000.0, 9.0), 2: (2000.0, 6.0), 1: (5000.0, 2.0)}

    def search(part: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
        searched.append((set(part.nodes), control.deadline_seconds))
        return [costing(any_candidate, *answers[len(part.nodes)])]

    on_subclusters_in_time(search, timed, SearchControl(deadline_seconds=80.0, clock=lambda: 0.0), 1)
    everything, *parts = searched
    assert everything == ({FAST, OTHER_FAST, SLOW}, 20.0)
    assert parts == [({SLOW}, 20.0), ({FAST}, 80 / 3), ({FAST, OTHER_FAST}, 40.0), ({FAST, SLOW}, 80.0)]


def test_error_without_a_plan_is_that_of_all_devices(problem: Problem) -> None:
    def search(part: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
        raise NoFeasiblePlan(f"{len(part.nodes)} nodes are too few")

    with pytest.raises(NoFeasiblePlan, match="3 nodes"):
        on_growing_subclusters(search, problem, SearchControl(), 1)


def tried(planner: str, part: Problem) -> list[Candidate]:
    try:
        return run(planner, replace(part, limits=replace(part.limits, objective=Objective.TIME)))
    except NoFeasiblePlan:
        return []


def test_a_long_front_is_thinned_evenly_with_both_ends(any_candidate: Candidate) -> None:
    whole = [costing(any_candidate, 1.0 + n, 1.0) for n in range(9)]
    assert [one.estimate.iteration_seconds for one in subsampled(whole, 3)] == [1, 5, 9]
    assert subsampled(whole, 1) == whole[:1]
    assert subsampled(whole, 9) == subsampled(whole, None) == subsampled(whole, 99) == whole
    assert [one.estimate.iteration_seconds for one in subsampled(whole, 2)] == [1, 9]


def test_missing_prices_are_named(problem: Problem, any_candidate: Candidate) -> None:
    with pytest.raises(
        ValueError, match="planning for cost needs the price of every accelerator, and emulated-slow has"
    ):
        run("megatron", priced(problem, 1.0, None))
    with pytest.raises(ValueError, match="needs the price of every accelerator"):
        pareto_front([costing(any_candidate, 1.0, None)])
    with pytest.raises(ValueError, match="needs the price of every accelerator"):
        pareto_plot([costing(any_candidate, 1.0, None)], 80)


def test_fewer_subclusters_are_searched_when_limited(problem: Problem) -> None:
    assert [part.nodes for part in subclusters(problem, 3)][:1] == [problem.nodes]
    assert len(list(subclusters(problem, 3))) <= 3 < len(list(subclusters(problem)))


def test_a_spent_budget_shortens_the_front(problem: Problem) -> None:
    control = SearchControl.with_budget(0.0)
    assert run("megatron", problem, control=control)
    assert control.budget_exhausted.is_set()


def test_the_plot_shows_every_rank_at_its_place(any_candidate: Candidate) -> None:
    candidates = [
        costing(any_candidate, seconds, price / seconds) for seconds, price in ((1.0, 9.0), (2.0, 3.0), (5.0, 1.0))
    ]
    lines = pareto_plot(candidates, 60).plain.splitlines()
    rows = lines[1 : HEIGHT + 1]
    assert max(map(len, lines)) <= 60
    places = {mark: (row, line.index(mark, 8)) for row, line in enumerate(rows) for mark in "123" if mark in line[8:]}
    assert places["1"][0] == 0
    assert places["3"][0] == HEIGHT - 1
    assert 0 < places["2"][0] < HEIGHT - 1
    assert places["1"][1] < places["2"][1] < places["3"][1]
    assert "1 s" in lines[-2]
    assert "5 s" in lines[-2]


def test_a_single_point_and_equal_points_are_drawn(any_candidate: Candidate) -> None:
    one = costing(any_candidate, 1.0, 1.0)
    assert "1" in pareto_plot([one], 80).plain
    assert "2" not in "".join(line[9:] for line in pareto_plot([one, one], 80).plain.splitlines()[1 : HEIGHT + 1])
