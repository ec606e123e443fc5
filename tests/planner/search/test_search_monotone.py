"""Exhaustive AMP search: it is optimal, and better hardware never makes it slower; elsewhere its polish step helps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.cluster import EMULATED_PREFIX, Cluster
from trainwright.cost.estimate import Estimate, estimate_with_context
from trainwright.profiles import Profiles
from trainwright.search import NoFeasiblePlan, Problem, SearchControl, run
from trainwright.search.amp import MAX_EXHAUSTIVE_PLANS, PartitionDescent, amp, count_plans, partition_neighbours
from trainwright.search.candidates import candidate_of
from trainwright.search.degrees import micro_batch_sizes
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.search.uniform.placed_stages import uniform_plan
from trainwright.search.uniform.plan_space import UniformPlanSpace, open_degrees

MakeCluster = Callable[..., Cluster]
MakeProblem = Callable[..., Problem]
Draw = Callable[[random.Random], Problem]

randoms = st.randoms(use_true_random=False)
MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def draw(make_problem: MakeProblem, make_cluster: MakeCluster) -> Draw:
    """Draw problems with few plans and different links, many with scarce memory."""

    def drawn(pick: random.Random) -> Problem:
        nodes = [(pick.choice(["fast", "slow"]), pick.randint(1, 2)) for _ in range(pick.randint(1, 3))]
        memory = None if pick.random() < 0.5 else int(pick.uniform(6, 24) * MEBIBYTE)
        cluster = make_cluster(nodes, between=pick.choice([2e6, 5e6, 2e7]), memory=memory)
        links = tuple(
            replace(link, bandwidth_bytes_per_second=link.bandwidth_bytes_per_second * pick.uniform(0.2, 3))
            for link in cluster.links
        )
        problem = make_problem(
            replace(cluster, links=links), layers=pick.randint(2, 5), batch=pick.choice([2, 4, 6, 8])
        )
        assert count_plans(problem) <= MAX_EXHAUSTIVE_PLANS
        return problem

    return drawn


def with_real_cards(problem: Problem) -> Problem:
    """Return the problem without emulation: under emulation a node's link is one queue.

    In a queue an earlier message may delay a more critical one, so that better hardware can be slower, as in reality.
    """

    def real(name: str) -> str:
        return name.removeprefix(EMULATED_PREFIX)

    cluster = problem.cluster
    accelerators = tuple(replace(one, name=real(one.name), emulation=None) for one in cluster.accelerators)
    nodes = tuple(replace(node, accelerator=real(node.accelerator)) for node in cluster.nodes)
    layers = tuple(replace(layer, accelerator=real(layer.accelerator)) for layer in problem.profiles.layers)
    return replace(problem, cluster=replace(cluster, accelerators=accelerators, nodes=nodes), profiles=Profiles(layers))


def best(problem: Problem) -> float:
    try:
        return run("amp", problem, top=1)[0].estimate.iteration_seconds
    except NoFeasiblePlan:
        return float("inf")


def every_estimate(problem: Problem) -> Iterator[Estimate]:
    """Yield the estimates of all layer assignments of all degrees in all node orders."""
    layers = len(problem.model.layers)
    by_node = [[device for device in problem.devices if device.node == name] for name in problem.nodes]
    for order in permutations(by_node):
        devices = [device for node in order for device in node]
        for degrees in open_degrees(problem):
            for rows in micro_batch_sizes(problem.global_batch_size, degrees.data):
                for cuts in combinations(range(1, layers), degrees.pipeline - 1):
                    plan = uniform_plan(
                        devices, degrees, rows, (*cuts, layers), global_batch_size=problem.global_batch_size
                    )
                    plan = with_runtime_choices(plan, problem.cost_context)
                    yield estimate_with_context(plan, problem.cost_context)


def faster_link(problem: Problem, pick: random.Random) -> Problem:
    links = list(problem.cluster.links)
    number = pick.randrange(len(links))
    bandwidth = links[number].bandwidth_bytes_per_second * pick.uniform(1.05, 4)
    links[number] = replace(links[number], bandwidth_bytes_per_second=bandwidth)
    return replace(problem, cluster=replace(problem.cluster, links=tuple(links)))


def shorter_latency(problem: Problem, pick: random.Random) -> Problem:
    links = list(problem.cluster.links)
    number = pick.randrange(len(links))
    links[number] = replace(links[number], latency_seconds=links[number].latency_seconds * pick.random())
    return replace(problem, cluster=replace(problem.cluster, links=tuple(links)))


def faster_device(problem: Problem, pick: random.Random) -> Problem:
    accelerator, share = pick.choice(problem.cluster.accelerators).name, pick.uniform(0.4, 0.97)
    layers = tuple(
        replace(
            layer,
            forward_seconds=share * layer.forward_seconds,
            backward_seconds=share * layer.backward_seconds,
            update_seconds=share * layer.update_seconds,
        )
        if layer.accelerator == accelerator
        else layer
        for layer in problem.profiles.layers
    )
    return replace(problem, profiles=Profiles(layers))


def more_memory(problem: Problem, pick: random.Random) -> Problem:
    chosen, factor = pick.choice(problem.cluster.accelerators), pick.uniform(1.05, 2)
    accelerators = tuple(
        replace(one, memory_bytes=int(factor * one.memory_bytes)) if one is chosen else one
        for one in problem.cluster.accelerators
    )
    return replace(problem, cluster=replace(problem.cluster, accelerators=accelerators))


@pytest.mark.parametrize("better", [faster_link, shorter_latency, faster_device, more_memory])
@examples(30)
@given(pick=randoms)
def test_answer_never_slows_when_hardware_improves(
    draw: Draw, better: Callable[[Problem, random.Random], Problem], pick: random.Random
) -> None:
    problem = with_real_cards(draw(pick))
    assert best(better(problem, pick)) <= best(problem) * (1 + 1e-8)


@examples(25)
@given(pick=randoms)
def test_answer_is_optimal_when_plans_are_few(draw: Draw, pick: random.Random) -> None:
    problem = draw(pick)
    everything = [found.iteration_seconds for found in every_estimate(problem) if found.feasible]
    assert len(everything) <= count_plans(problem)
    assert best(problem) == pytest.approx(min(everything, default=float("inf")), rel=1e-8)


def test_number_of_plans_does_not_depend_on_speed_or_memory(draw: Draw) -> None:
    pick = random.Random(1)
    for _ in range(5):
        problem = draw(pick)
        for better in (faster_link, faster_device, more_memory):
            assert count_plans(better(problem, pick)) == count_plans(problem)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((4,), []),
        ((1, 2, 3), []),
        ((1, 3, 4), [(2, 3, 4), (1, 2, 4)]),
        ((4, 5), [(3, 5), (2, 5)]),
        ((1, 2, 5), [(2, 3, 5), (3, 4, 5), (1, 3, 5), (1, 4, 5)]),
    ],
)
def test_a_move_takes_layers_from_one_stage_and_gives_them_to_another(
    ends: tuple[int, ...], expected: list[tuple[int, ...]]
) -> None:
    assert sorted(partition_neighbours(ends)) == sorted(expected)


@given(cuts=st.sets(st.integers(1, 39), max_size=8))
def test_no_move_empties_a_stage_or_loses_a_layer(cuts: set[int]) -> None:
    ends = (*sorted(cuts), 40)
    found = partition_neighbours(ends)
    assert len(set(found)) == len(found)
    for other in found:
        assert other != ends
        assert other[-1] == 40
        assert list(other) == sorted({*other} - {0})
        assert len(other) == len(ends)


@pytest.fixture(scope="module")
def larger(make_problem: MakeProblem, make_cluster: MakeCluster) -> Problem:
    """Problems with more plans than are costed, and little memory."""
    nodes = (("fast", 2), ("slow", 2), ("fast", 2), ("fast", 2))
    problem = make_problem(make_cluster(nodes, between=5e6, memory=40 * MEBIBYTE), layers=12, batch=16)
    assert count_plans(problem) > MAX_EXHAUSTIVE_PLANS
    return problem


@examples(20)
@given(pick=randoms, tries=st.integers(0, 30))
def test_polish_never_slows_a_plan_and_keeps_its_degrees(larger: Problem, pick: random.Random, tries: int) -> None:
    drafting = UniformPlanSpace.of(larger)
    stages, rows = pick.choice([choice for choice in drafting.choices() if choice[0].pipeline > 1])
    assignments = [(*sorted(pick.sample(range(1, 14), stages.pipeline - 1)), 14) for _ in range(20)]
    ends = next((some for some in assignments if drafting.fits(stages, rows, some)), None)
    if ends is None:
        return
    before = candidate_of(larger, drafting.plan(stages.placement, rows, ends))
    polish = PartitionDescent(drafting, tries, patience=8)
    after = polish.improve(before)
    assert 0 <= polish.remaining_replays <= tries
    assert after.estimate.feasible
    assert after.estimate.iteration_seconds <= before.estimate.iteration_seconds
    assert after.plan.devices == before.plan.devices
    for new, old in zip(after.plan.pipelines[0].stages, before.plan.pipelines[0].stages, strict=True):
        assert (new.layers[0].strategy.tensor, new.layers[0].rows) == (
            old.layers[0].strategy.tensor,
            old.layers[0].rows,
        )
    if tries == 0:
        assert after == before


def test_polish_balances_uneven_stages(larger: Problem) -> None:
    drafting = UniformPlanSpace.of(larger)
    stages, rows = next(choice for choice in drafting.choices() if choice[0].placement.shape == (4, 2, 1))
    lopsided = candidate_of(larger, drafting.plan(stages.placement, rows, (1, 2, 3, 14)))
    polished = PartitionDescent(drafting, 200, patience=200).improve(lopsided)
    assert polished.estimate.iteration_seconds < 0.7 * lopsided.estimate.iteration_seconds
    ends = tuple(stage.end for stage in polished.plan.pipelines[0].stages)
    for other in partition_neighbours(ends):
        if drafting.fits(stages, rows, other):
            seconds = candidate_of(larger, drafting.plan(stages.placement, rows, other)).estimate.iteration_seconds
            assert seconds >= polished.estimate.iteration_seconds


def test_best_plans_are_no_slower_than_equation_5(larger: Problem) -> None:
    by_choice: dict[object, float] = {}
    drafting = UniformPlanSpace.of(larger)
    for stages, rows in drafting.choices():
        ends = drafting.best_assignment(stages, rows)
        if ends is not None:
            plan = drafting.plan(stages.placement, rows, ends)
            by_choice[stages.placement.shape, rows] = estimate_with_context(plan, larger.cost_context).iteration_seconds
    found = amp(larger, SearchControl(), None)
    assert len(found) == len(by_choice)
    for candidate in found:
        first = candidate.plan.pipelines[0].stages
        run_ = first[0].layers[0]
        choice = (len(first), run_.strategy.data, run_.strategy.tensor), run_.rows[0]
        assert candidate.estimate.iteration_seconds <= by_choice[choice]
    assert found[0].estimate.iteration_seconds < min(by_choice.values())
