"""Results of the searches."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.cluster import Cluster, Node
from trainwright.cost.estimate import estimate, estimate_with_context
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan, divisors
from trainwright.profiles import LayerCost, Profiles
from trainwright.runtime import Runtime
from trainwright.search import SEARCHES, NoFeasiblePlan, Problem, RequiredProfile, SearchControl, required_profiles, run
from trainwright.search.degrees import Degrees, enumerate_degrees, micro_batch_sizes
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.search.uniform import amp_model
from trainwright.search.uniform.placed_stages import megatron_placement, uniform_plan
from trainwright.search.uniform.plan_space import UniformPlanSpace
from trainwright.training import Optimizer

MakeCluster = Callable[..., Cluster]
MakeProblem = Callable[..., Problem]

AMP_FAMILY = ("amp", "amp-annealing", "megatron", "random")
MIXED = (("fast", 4), ("fast", 4), ("fast", 4), ("slow", 4))


@pytest.fixture(scope="module")
def mixed(make_problem: MakeProblem, make_cluster: MakeCluster) -> Problem:
    """AMP's setting: three nodes of four fast devices, one of four slow ones, slow links between nodes."""
    return make_problem(make_cluster(MIXED, between=5e6, within=1e8), layers=24, batch=32)


@pytest.mark.parametrize("planner", SEARCHES)
def test_candidates_are_feasible_distinct_best_first_and_use_every_device(mixed: Problem, planner: str) -> None:
    """Only `auto` leaves out devices that slow the others down."""
    candidates = run(planner, mixed, control=SearchControl(effort=0.1))  # counts for `auto` alone
    times = [candidate.estimate.iteration_seconds for candidate in candidates]
    assert times == sorted(times)
    assert len({candidate.plan for candidate in candidates}) == len(candidates)
    for candidate in candidates:
        assert candidate.estimate.feasible
        assert planner == "auto" or sorted(candidate.plan.devices) == sorted(mixed.cluster.devices)
        assert set(candidate.plan.devices) <= set(mixed.cluster.devices)
        assert candidate.estimate == estimate(
            candidate.plan, model=mixed.model, cluster=mixed.cluster, profiles=mixed.profiles
        )


def test_amp_beats_megatron_on_a_mixed_cluster_with_slow_links(
    mixed: Problem, record_property: Callable[[str, object], None]
) -> None:
    best, baseline = run("amp", mixed, top=1)[0], run("megatron", mixed, top=1)[0]
    speedup = baseline.estimate.iteration_seconds / best.estimate.iteration_seconds
    record_property("predicted_speedup", f"{best.plan.summary()} over {baseline.plan.summary()}: {speedup:.2f}")
    assert speedup > 1.3
    # As in the paper: Megatron's smallest degrees mean large replicas' rings; AMP makes the pipeline deeper.
    assert len(best.plan.pipelines[0].stages) > len(baseline.plan.pipelines[0].stages)


def test_amp_gives_the_slow_stage_fewer_layers(mixed: Problem) -> None:
    looked_at = 0
    for candidate in run("amp", mixed):
        stages = candidate.plan.pipelines[0].stages
        if len(stages) == 4 and candidate.plan.pipelines[0].micro_batches >= 8:
            sizes = {stage.devices[0].node: stage.end - stage.first for stage in stages}
            assert sizes.pop("node-4") < min(sizes.values())
            looked_at += 1
    assert looked_at


def test_every_choice_gets_the_optimum_of_the_equation(make_problem: MakeProblem, make_cluster: MakeCluster) -> None:
    """Algorithm 1 by enumeration of all assignments, degrees and micro-batch sizes."""
    problem = make_problem(make_cluster((("fast", 2), ("slow", 2)), between=2e6), layers=4, batch=4)
    drafting = UniformPlanSpace.of(problem)
    found = {(Degrees(*stages.placement.shape), rows): (stages, rows) for stages, rows in drafting.choices()}
    expected = {(d, rows) for d in enumerate_degrees(4, (1, 2, 4), 6) for rows in micro_batch_sizes(4, d.data)}
    assert len(expected) > 10
    assert set(found) == expected
    for (degrees, rows), choice in found.items():
        ends = drafting.best_assignment(*choice)
        assert ends is not None
        tried = {
            some: pipeline_seconds(
                uniform_plan(drafting.order.devices, degrees, rows, some, global_batch_size=4), problem
            )
            for cuts in combinations(range(1, 6), degrees.pipeline - 1)
            for some in [(*cuts, 6)]
        }
        assert tried[ends] == pytest.approx(min(tried.values()))


def gradient_seconds(plan: Plan, problem: Problem) -> float:
    """Eq. 4's second term, which the layer assignment ignores."""
    scene = amp_model._AmpModel(problem.cost_context)
    return max(scene.sync_seconds(stage) for stage in plan.pipelines[0].stages)


def pipeline_seconds(plan: Plan, problem: Problem) -> float:
    """Eq. 5."""
    plan = with_runtime_choices(plan, problem.cost_context)
    return amp_model.estimate_seconds(plan, problem.cost_context) - gradient_seconds(plan, problem)


@examples(60)
@given(
    degrees=st.sampled_from([Degrees(4, 2, 1), Degrees(2, 2, 2), Degrees(8, 1, 1), Degrees(1, 4, 2)]),
    rows=st.sampled_from([1, 2, 4]),
    memory=st.integers(2 * 2**20, 40 * 2**20),
    dtype=st.sampled_from(Dtype),
    optimizer=st.sampled_from(["adam", "sgd"]),
    runtime=st.sampled_from(
        [
            Runtime(),
            Runtime(sequence_parallel=False),
            Runtime(link_ratio=0.5, constant_bytes=2**20, activation_ratio=1.3, gradient_dtype=Dtype.FLOAT32),
        ]
    ),
    pick=st.randoms(use_true_random=False),
)
def test_the_tables_agree_with_the_estimate(
    *,
    make_problem: MakeProblem,
    make_cluster: MakeCluster,
    degrees: Degrees,
    rows: int,
    memory: int,
    dtype: Dtype,
    optimizer: Optimizer,
    runtime: Runtime,
    pick: random.Random,
) -> None:
    problem = make_problem(make_cluster(memory=memory))
    model = Model.of(problem.model.family, dtype)
    problem = replace(problem, model=model, optimizer=optimizer, runtime=runtime)
    ends = (*sorted(pick.sample(range(1, 14), degrees.pipeline - 1)), 14)
    plan = uniform_plan(problem.devices, degrees, rows, ends, global_batch_size=16)
    plan = with_runtime_choices(plan, problem.cost_context)
    drafting = UniformPlanSpace.of(problem)
    stages = drafting.tables.place_stages(megatron_placement(degrees))
    fits = drafting.fits(stages, rows, ends)
    assert fits == estimate_with_context(plan, problem.cost_context).feasible
    spans = list(enumerate(zip((0, *ends), ends, strict=False)))
    times = drafting.tables.times(stages, rows)
    stage_times = [times[stage, first, end] for stage, (first, end) in spans]
    exchanges = sum(drafting.tables.boundary_seconds(stages, rows)[stage, end] for stage, end in enumerate(ends[:-1]))
    m = 16 // (rows * degrees.data)
    whole = (m - 1) * max(stage_times) + sum(stage_times) + exchanges
    sync = drafting.tables.sync_seconds(stages, ends)
    assert sync == pytest.approx(gradient_seconds(plan, problem))
    assert whole + sync == pytest.approx(amp_model.estimate_seconds(plan, problem.cost_context))


def test_megatron_takes_the_smallest_model_parallel_degree_of_every_micro_batch_size(mixed: Problem) -> None:
    smallest: dict[int, set[int]] = {}
    for candidate in run("megatron", mixed):
        pipeline = candidate.plan.pipelines[0]
        layers = pipeline.stages[0].layers[0]
        assert layers.strategy.tensor <= 4
        smallest.setdefault(layers.rows[0], set()).add(layers.strategy.tensor * len(pipeline.stages))
        blocks = [stage.end - stage.first for stage in pipeline.stages]
        blocks[0] -= 1
        blocks[-1] -= 1
        assert max(blocks) - min(blocks) <= 1
    # 16 devices, 32 rows: replicas of r rows leave room for at most 32 / r replicas.
    assert smallest == {1: {1}, 2: {1}, 4: {2}, 8: {4}, 16: {8}, 32: {16}}


def test_megatron_uses_more_stages_when_memory_is_scarce(make_problem: MakeProblem, make_cluster: MakeCluster) -> None:
    roomy, tight = (make_problem(make_cluster(memory=size * 2**20)) for size in (64, 24))
    shallow, deep = (
        min(
            len(c.plan.pipelines[0].stages) * c.plan.pipelines[0].stages[0].layers[0].strategy.tensor
            for c in run("megatron", p)
        )
        for p in (roomy, tight)
    )
    assert (shallow, deep) == (1, 2)


def test_the_largest_tensor_degree_is_kept(make_problem: MakeProblem) -> None:
    for planner in SEARCHES:
        for candidate in run(planner, make_problem(max_tensor_degree=1)):
            assert all(stage.layers[0].strategy.tensor == 1 for stage in candidate.plan.pipelines[0].stages)


def test_a_degree_without_profiles_is_left_out(make_problem: MakeProblem) -> None:
    problem = make_problem()
    some = tuple(p for p in problem.profiles.layers if (p.accelerator, p.tensor_degree) != ("emulated-slow", 2))
    candidates = run("amp", replace(problem, profiles=Profiles(some)))
    degrees = {c.plan.pipelines[0].stages[0].layers[0].strategy.tensor for c in candidates}
    assert degrees == {1, 4}


def test_missing_profiles_are_named(make_problem: MakeProblem) -> None:
    problem = make_problem()
    some = tuple(p for p in problem.profiles.layers if p.accelerator != "emulated-slow")
    for planner in SEARCHES:
        with pytest.raises(ValueError, match="no profile of layer kind embedding on emulated-slow"):
            run(planner, replace(problem, profiles=Profiles(some)))


@pytest.mark.parametrize("planner", AMP_FAMILY)
def test_infeasible_search_reports_the_closest_plan(
    make_problem: MakeProblem, make_cluster: MakeCluster, planner: str
) -> None:
    problem = make_problem(make_cluster(memory=2**20))
    with pytest.raises(NoFeasiblePlan, match=r"no plan fits into memory; the closest is pp.*lacks .* MiB"):
        run(planner, problem)


def test_closest_plan_of_auto_lacks_least(make_problem: MakeProblem, make_cluster: MakeCluster) -> None:
    problem, lacking = make_problem(make_cluster(memory=2**20)), {}
    for planner in ("auto", "amp", "galvatron-base"):
        with pytest.raises(NoFeasiblePlan) as refused:
            run(planner, problem)
        found = re.search(r"lacks (\S+) MiB: the plan needs", str(refused.value))
        assert found is not None, refused.value
        lacking[planner] = float(found[1])
    assert lacking["auto"] == min(lacking.values()), lacking


def test_model_larger_than_all_memory_is_told(make_problem: MakeProblem, make_cluster: MakeCluster) -> None:
    for memory, is_told in ((2**20, True), (2**23, False)):
        problem = make_problem(make_cluster(memory=memory))
        with pytest.raises(NoFeasiblePlan) as refused:
            run("megatron", problem)
        state = problem.model.parameters * problem.cost_context.value_bytes.unsharded
        assert (state > memory * len(problem.devices)) == is_told
        assert ("all devices together have 8.0 MiB: use more devices" in str(refused.value)) == is_told


@pytest.mark.parametrize("planner", AMP_FAMILY)
def test_indivisible_devices_are_explained(make_problem: MakeProblem, make_cluster: MakeCluster, planner: str) -> None:
    problem = make_problem(make_cluster((("fast", 7),)), layers=2, batch=3)
    with pytest.raises(NoFeasiblePlan, match="no plan uses all 7 devices with 4 layers, a global batch of 3 rows"):
        run(planner, problem)


@pytest.mark.parametrize("planner", AMP_FAMILY)
def test_infeasible_degrees_are_refused_quickly_on_many_nodes(
    make_problem: MakeProblem, make_cluster: MakeCluster, planner: str
) -> None:
    """127 nodes have too many orders to store; none needs costing if no degrees fit."""
    cluster = make_cluster((*[("fast", 1)] * 42, *[("slow", 1)] * 85), between=5e6, within=1e8)
    with pytest.raises(NoFeasiblePlan, match="no plan uses all 127 devices"):
        run(planner, make_problem(cluster, layers=24, batch=32))


def test_an_unknown_planner_is_refused_with_the_known_ones(mixed: Problem) -> None:
    with pytest.raises(ValueError, match="unknown planner 'best'; choose one of amp, amp-annealing"):
        run("best", mixed)
    with pytest.raises(ValueError, match="top must be at least 1"):
        run("amp", mixed, top=0)


def test_top_keeps_the_best(mixed: Problem) -> None:
    assert run("megatron", mixed, top=2) == run("megatron", mixed)[:2]


def test_required_profiles_equal_those_a_search_looks_up(make_problem: MakeProblem) -> None:
    problem = make_problem()
    needed = required_profiles(problem.cluster.nodes, problem.model, 16, None)
    assert needed == tuple(
        RequiredProfile(accelerator, degree, (1, 2, 4, 8))
        for accelerator in ("emulated-fast", "emulated-slow")
        for degree in (1, 2, 4)
    )
    looked_up: set[tuple[str, int]] = set()

    class Spy(Profiles):
        def cost(self, accelerator: str, kind: str, tensor_degree: int, rows: int) -> LayerCost:
            looked_up.add((accelerator, tensor_degree))
            return super().cost(accelerator, kind, tensor_degree, rows)

    run("amp", replace(problem, profiles=Spy(problem.profiles.layers)))
    assert looked_up == {(need.accelerator, need.tensor_degree) for need in needed}


def test_required_profiles_keep_the_limits(make_problem: MakeProblem) -> None:
    model = make_problem().model
    nodes = (Node("a", "x", 3), Node("b", "y", 3))
    for limit, degrees in ((2, (1, 2)), (None, (1, 2, 4))):  # 4 for stages of four of the six devices
        assert required_profiles(nodes, model, 3, limit) == tuple(
            RequiredProfile(accelerator, degree, (1, 2)) for accelerator in "xy" for degree in degrees
        )
    assert required_profiles(nodes[:1], model, 1, max_tensor_degree=1) == (RequiredProfile("x", 1, (1,)),)


def test_required_profiles_cover_those_auto_looks_up(make_problem: MakeProblem, make_cluster: MakeCluster) -> None:
    """On seven devices, too, of which few degrees divide all."""

    def problem_on(fast: int, slow: int) -> Problem:
        cluster = make_cluster((("fast", fast), ("slow", slow)))
        return make_problem(cluster, layers=3, heads=12, batch=4, hidden=96)

    looked_up: set[int] = set()

    class Spy(Profiles):
        def cost(self, accelerator: str, kind: str, tensor_degree: int, rows: int) -> LayerCost:
            looked_up.add(tensor_degree)
            return super().cost(accelerator, kind, tensor_degree, rows)

    problem, every_degree = problem_on(4, 3), problem_on(12, 12).profiles.layers
    run("auto", replace(problem, profiles=Spy(every_degree)), top=1)
    ordered = {need.tensor_degree for need in required_profiles(problem.cluster.nodes, problem.model, 4)}
    assert looked_up <= ordered
    assert {layer.tensor_degree for layer in every_degree} > ordered == {1, 2, 3, 4}


@given(st.integers(1, 5000))
def test_divisors_are_complete(number: int) -> None:
    assert divisors(number) == tuple(d for d in range(1, number + 1) if number % d == 0)


@given(devices=st.integers(1, 64), max_pipeline=st.integers(1, 64))
def test_degrees_multiply_to_the_devices(devices: int, max_pipeline: int) -> None:
    tensors = tuple(d for d in divisors(devices) if d <= 4)
    found = list(enumerate_degrees(devices, tensors, max_pipeline))
    every = [
        Degrees(p, devices // (p * t), t) for t in tensors for p in range(1, max_pipeline + 1) if devices % (p * t) == 0
    ]
    assert sorted(found) == sorted(every)
