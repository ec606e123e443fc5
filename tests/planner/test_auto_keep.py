"""Re-planning beside something that runs: what moves, which devices play which role, and what is made of the old plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.cluster import Cluster, Device
from trainwright.cost.estimate import estimate_in
from trainwright.cost.links import node_classes
from trainwright.cost.memory import OPTIMIZER_BYTES, master_bytes
from trainwright.cost.setting import Setting
from trainwright.plan import LayerRun, Order, Pipeline, Plan, Sharding, Stage
from trainwright.search import Limits, NoFeasiblePlan, Preference, Problem, run
from trainwright.search.preference.adaption import adapted
from trainwright.search.preference.alignment import aligned
from trainwright.search.preference.keep import keep_order, moved_bytes, moved_seconds
from trainwright.search.preference.stages import in_proportion
from trainwright.search.ranking import candidate_of

MakeProblem = Callable[..., Problem]
MakeCluster = Callable[..., Cluster]
MakePlan = Callable[..., Plan]

UNITS = 2 * 2 * 3 * 4
"""A layer's values in so many equal parts: every degree and share of these tests takes whole ones."""


Unit = tuple[str, str, bool, int]
"""Weights or optimizer, of which weight, whether of the values that tensor groups divide, and the part's number."""


def held_units(plan: Plan, setting: Setting) -> dict[Device, set[Unit]]:
    """Oracle: by device every small part that it holds."""
    found: dict[Device, set[Unit]] = {}
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
        for index, device in enumerate(stage.devices):
            for name, flag, divided, run_ in named_values(stage, setting):
                inner = run_.order is Order.TENSOR_INNER
                replica, part = divmod(index, run_.tensor) if inner else (index % run_.data, index // run_.data)
                for state, shards in (
                    ("weights", run_.sharding is Sharding.ZERO3),
                    ("optimizer", run_.sharding is not Sharding.NONE),
                ):
                    size = UNITS // run_.tensor if divided else UNITS
                    start = part * size if divided else 0
                    if shards:
                        size //= run_.data
                        start += replica * size
                    held = found.setdefault(device, set())
                    held |= {(state, name, flag, unit) for unit in range(start, start + size)}
    return found


def named_values(stage: Stage, setting: Setting) -> list[tuple[str, bool, bool, LayerRun]]:
    """The stage's weights: name, whether these are the values divided by nature, whether they are divided here."""
    found = []
    owned: set[str] = set()
    for run_ in stage.layers:
        for layer in range(run_.first, run_.first + run_.count):
            kind = setting.model.kind_of(layer)
            found.append((f"layer {layer}", False, False, run_))
            if kind.is_tensor_parallel:
                found.append((f"layer {layer}", True, True, run_))
            if kind.shared_weight and kind.shared_weight not in owned:
                owned.add(kind.shared_weight)
                found.append((kind.shared_weight, False, setting.divides(kind, run_.tensor), run_))
    return found


def units_to_bytes(units: set[Unit], setting: Setting) -> float:
    model = setting.model
    per_value = {
        "weights": model.dtype.num_bytes,
        "optimizer": master_bytes(model) + OPTIMIZER_BYTES[setting.optimizer],
    }
    total = 0.0
    for state, name, divided, _ in units:
        if name.startswith("layer "):
            kind = model.kind_of(int(name.removeprefix("layer ")))
            own = kind.parameters - (kind.shared_parameters if kind.shared_weight else 0)
            split = min(kind.split_parameters, own) if kind.is_tensor_parallel else 0
            values = split if divided else own - split
        else:
            values = next(kind.shared_parameters for kind in model.kinds if kind.shared_weight == name)
        total += per_value[state] * values / UNITS
    return total


@st.composite
def plans(draw: st.DrawFn, devices: tuple[Device, ...], layers: int, batch: int) -> Plan:
    """Plans of one pipeline on some of eight devices, stages of 1, 2 or 4 devices."""
    shuffled = draw(st.permutations(devices))
    sizes, left = [], len(devices)
    while left and len(sizes) < 3 and (not sizes or draw(st.booleans())):
        sizes.append(draw(st.sampled_from([size for size in (1, 2, 4) if size <= left])))
        left -= sizes[-1]
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), min_size=len(sizes) - 1, max_size=len(sizes) - 1)))
    stages, at = [], 0
    for size, first, end in zip(sizes, [0, *cuts], [*cuts, layers], strict=True):
        middle = draw(st.sampled_from([first, *range(first + 1, end)]))
        runs = []
        for start, stop in ((first, middle), (middle, end)):
            if start == stop:
                continue
            tensor = draw(st.sampled_from([degree for degree in (1, 2, 4) if size % degree == 0]))
            rows = (8 // (size // tensor),) * (size // tensor)
            runs.append(
                LayerRun(
                    start,
                    stop - start,
                    tensor,
                    size // tensor,
                    rows,
                    draw(st.sampled_from(Order)),
                    draw(st.sampled_from(Sharding)),
                )
            )
        stages.append(Stage(tuple(shuffled[at : at + size]), tuple(runs)))
        at += size
    return Plan(layers, batch, (Pipeline(batch // 8, 8, tuple(stages)),))


def problem_of(make_problem: MakeProblem, make_cluster: MakeCluster, nodes: tuple[tuple[str, int], ...]) -> Problem:
    return make_problem(make_cluster(nodes), layers=4, batch=16)


EIGHT = (("fast", 2), ("fast", 2), ("fast", 2), ("slow", 2))


@settings(max_examples=60)
@given(data=st.data())
def test_moved_bytes_are_those_that_counting_every_part_gives(
    data: st.DataObject, make_problem: MakeProblem, make_cluster: MakeCluster
) -> None:
    problem = problem_of(make_problem, make_cluster, EIGHT)
    old, new = (data.draw(plans(problem.cluster.devices, 6, 16)) for _ in range(2))
    before, after = held_units(old, problem.setting), held_units(new, problem.setting)
    expected = sum(
        units_to_bytes(parts - before.get(device, set()), problem.setting) for device, parts in after.items()
    )
    assert moved_bytes(old, new, problem.setting) == pytest.approx(expected, abs=len(after))
    assert moved_bytes(old, old, problem.setting) == 0


def test_a_shared_weight_is_not_moved_to_a_device_that_has_it(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem(layers=4)
    shared = next(kind for kind in problem.model.kinds if kind.shared_weight)
    one, other = problem.cluster.devices[:2]
    both_ends = make_plan(problem, (6,), devices=(one,))
    last = make_plan(problem, (5, 1), devices=(other, one))
    # The last layer's own values and the tied ones are on `one` already.
    elsewhere = moved_bytes(
        both_ends, make_plan(problem, (5, 1), devices=(other, problem.cluster.devices[2])), problem.setting
    )
    assert elsewhere - moved_bytes(both_ends, last, problem.setting) >= shared.shared_parameters * (4 + 8)


def test_seconds_are_those_of_the_fullest_node_through_its_card(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    old = make_plan(problem, (14,), devices=problem.cluster.devices[:1])
    new = make_plan(problem, (14,), devices=problem.cluster.devices[2:3])
    moved = moved_bytes(old, new, problem.setting)
    assert moved_seconds(old, new, problem.setting) == pytest.approx(moved / 5e6)
    assert moved_seconds(old, old, problem.setting) == 0


def test_plans_for_different_models_are_refused(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem, other = make_problem(layers=4), make_problem(layers=5)
    plan = make_plan(problem, (6,))
    with pytest.raises(ValueError, match="the plan to keep is for a model of 7 layers, but this one has 6"):
        moved_bytes(make_plan(other, (7,)), plan, problem.setting)
    assert adapted(make_plan(other, (7,)), problem) == []


@settings(max_examples=40)
@given(data=st.data())
def test_alignment_moves_least_and_costs_the_same(
    data: st.DataObject, make_problem: MakeProblem, make_cluster: MakeCluster
) -> None:
    problem = problem_of(make_problem, make_cluster, EIGHT)
    old, new = (data.draw(plans(problem.cluster.devices, 6, 16)) for _ in range(2))
    found = aligned(new, old, problem)
    before, after = estimate_in(new, problem.setting), estimate_in(found, problem.setting)
    assert after.iteration_seconds == before.iteration_seconds
    assert after.peak_memory_bytes == before.peak_memory_bytes
    least = min(moved_bytes(old, plan, problem.setting) for plan in renamed(new, problem))
    assert moved_bytes(old, found, problem.setting) == least


def renamed(plan: Plan, problem: Problem) -> list[Plan]:
    """Oracle: the plan under every renaming of interchangeable nodes of two devices, and of their slots."""
    cluster = problem.cluster
    classes = node_classes(cluster)
    names = [node.name for node in cluster.nodes]
    found = []
    for order in permutations(range(len(names))):
        if any(classes[a] != classes[b] for a, b in enumerate(order)):
            continue
        for swapped in range(2 ** len(names)):
            name = {
                Device(names[a], slot): Device(names[b], slot ^ (swapped >> a & 1))
                for a, b in enumerate(order)
                for slot in range(2)
            }
            stages = tuple(
                replace(stage, devices=tuple(name[device] for device in stage.devices))
                for stage in plan.pipelines[0].stages
            )
            found.append(replace(plan, pipelines=(replace(plan.pipelines[0], stages=stages),)))
    return found


def test_a_plan_in_other_roles_finds_its_way_back(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    devices = problem.cluster.devices
    old = make_plan(problem, (5, 5, 4), data=2)
    turned = make_plan(problem, (5, 5, 4), data=2, devices=[devices[n] for n in (5, 4, 0, 1, 3, 2)])
    assert moved_bytes(old, turned, problem.setting) > 0
    assert moved_bytes(old, aligned(turned, old, problem), problem.setting) == 0
    assert aligned(old, old, problem) is old


def test_nodes_stay_where_changing_them_wins_nothing(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    devices = problem.cluster.devices
    elsewhere = make_plan(problem, (14,), data=2, devices=devices[6:])
    new = make_plan(problem, (14,), data=2, devices=devices[4:6])
    assert aligned(new, elsewhere, problem) is new


def test_nodes_that_are_spared_get_no_role(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    devices = problem.cluster.devices
    old = make_plan(problem, (14,), data=2, devices=devices[:2])
    spared = replace(problem, limits=Limits(spare=("node-1",)))
    new = make_plan(problem, (14,), data=2, devices=devices[2:4])
    assert aligned(new, old, spared).nodes == ("node-2",)
    assert aligned(new, old, problem).nodes == ("node-1",)


def test_many_sharded_nodes_are_aligned_at_once(make_problem: MakeProblem, make_cluster: MakeCluster) -> None:
    problem = make_problem(make_cluster((("fast", 1),) * 200), layers=2, batch=200)
    devices = list(problem.cluster.devices)
    run_ = LayerRun(0, 4, 1, 200, (1,) * 200, sharding=Sharding.ZERO3)

    def plan(order: list[Device]) -> Plan:
        return Plan(4, 200, (Pipeline(1, 200, (Stage(tuple(order), (run_,)),)),))

    old = plan(devices)
    random.Random(1).shuffle(devices)
    shuffled = plan(devices)
    # Shards are taken for equal where nodes that differ are so many: nothing is lost, nor gained.
    assert moved_bytes(old, aligned(shuffled, old, problem), problem.setting) <= moved_bytes(
        old, shuffled, problem.setting
    )


def test_moving_is_weighed_against_time(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    old = make_plan(problem, (1, 1, 1, 11), data=2)
    better = aligned(make_plan(problem, (4, 4, 4, 2), data=2), old, problem)
    candidates = [candidate_of(problem, plan) for plan in (old, better)]
    gain = candidates[0].estimate.iteration_seconds - candidates[1].estimate.iteration_seconds
    assert gain > 0
    even = gain / moved_seconds(old, better, problem.setting)
    assert keep_order(candidates, Preference(keep=old, keep_weight=even * 0.9), problem)[0][1].plan == better
    order = keep_order(candidates, Preference(keep=old, keep_weight=even * 1.1), problem)
    assert [one.plan for _, one in order] == [old, better]
    assert order[0][0] == candidates[0].estimate.iteration_seconds
    kept = run("amp", replace(problem, preference=Preference(keep=old, keep_weight=1e9)))[0]
    assert kept.plan == old
    assert "more of state moved" in (kept.traded or "")
    assert run("amp", replace(problem, preference=Preference(keep=old, keep_weight=0.0)))[0].plan != old


def test_the_running_plan_answers_where_the_search_finds_nothing(
    make_problem: MakeProblem, make_cluster: MakeCluster
) -> None:
    small = min(run("amp", make_problem()), key=lambda candidate: candidate.estimate.peak_memory_bytes)
    tight = make_problem(make_cluster(memory=small.estimate.peak_memory_bytes))
    with pytest.raises(NoFeasiblePlan):
        run("megatron", tight)
    kept = run("megatron", replace(tight, preference=Preference(keep=small.plan)))
    assert [one.plan for one in kept] == [small.plan]


def test_a_simpler_plan_within_the_tolerance_pays_for_moving_too(
    make_problem: MakeProblem, make_plan: MakePlan
) -> None:
    problem = make_problem()
    old = make_plan(problem, (4, 4, 4, 2), data=2)
    fewer = make_plan(problem, (14,), devices=problem.cluster.devices[:1])
    candidates = [candidate_of(problem, plan) for plan in (old, fewer)]
    slower = candidates[1].estimate.iteration_seconds / candidates[0].estimate.iteration_seconds - 1
    assert slower > 0
    near = [
        replace(one, estimate=replace(one.estimate, iteration_seconds=seconds))
        for one, seconds in zip(candidates, (1.0, 1.01), strict=True)
    ]
    charged = keep_order(near, Preference(0.03, old, 1e3), problem)
    assert [one.plan for _, one in charged] == [old, charged[1][1].plan]
    assert charged[1][0] > 1.01 * 1.03
    assert keep_order(near, Preference(0.0, old, 1e3), problem)[1] == (1.01, near[1])
    with pytest.raises(ValueError, match="keeps no plan"):
        keep_order(near, Preference(), problem)


def check_is_for(plan: Plan, problem: Problem) -> None:
    assert set(plan.devices) <= set(problem.devices)
    assert plan.global_batch_size == problem.global_batch_size
    estimate_in(plan, problem.setting)


def test_a_lost_node_leaves_plans_near_the_old_one(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    old = make_plan(problem, (4, 4, 4, 2), data=2)
    assert adapted(old, problem)[0] == old
    less = replace(problem, limits=Limits(spare=("node-2",)))
    found = adapted(old, less)
    assert found
    for plan in found:
        check_is_for(plan, less)
    shapes = [[stage.end - stage.first for stage in plan.pipelines[0].stages] for plan in found]
    assert [6, 6, 2] in shapes
    assert all(plan != old for plan in found)


def test_an_odd_number_of_layers_goes_to_both_neighbours(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    old = make_plan(problem, (4, 5, 5), data=2)
    found = adapted(old, replace(problem, limits=Limits(spare=("node-2",))))
    assert [6, 8] in [[stage.end - stage.first for stage in plan.pipelines[0].stages] for plan in found]


def test_lost_replicas_leave_their_rows_to_the_others(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    old = make_plan(problem, (7, 7), data=4, rows=2)
    less = replace(problem, limits=Limits(spare=("node-1",)))
    first = adapted(old, less)[0]
    assert first.pipelines[0].stages[0].layers[0].rows == (4, 4)
    assert first.pipelines[0].stages[1] == old.pipelines[0].stages[1]
    layers = {tuple(stage.end - stage.first for stage in plan.pipelines[0].stages) for plan in adapted(old, less)}
    assert {(7, 7), (5, 9), (14,)} <= layers


def test_a_lost_pipeline_leaves_its_rows_to_the_others(make_problem: MakeProblem) -> None:
    problem = make_problem()
    devices = problem.cluster.devices
    pipelines = tuple(Pipeline(2, 4, (Stage(devices[n : n + 4], (LayerRun(0, 14, 1, 4, (1,) * 4),)),)) for n in (0, 4))
    less = replace(problem, limits=Limits(use_nodes=("node-1", "node-2")))
    found = adapted(Plan(14, 16, pipelines), less)
    assert found == [Plan(14, 16, (replace(pipelines[0], micro_batches=4),))]


def test_a_new_node_becomes_replicas_a_stage_or_a_pipeline(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    old = make_plan(problem, (14,), data=2, rows=4, devices=problem.cluster.devices[:2])
    found = adapted(old, replace(problem, limits=Limits(use_nodes=("node-1", "node-2"))))
    assert found[0] == old
    assert any(stage.layers[0].data == 4 for plan in found for stage in plan.pipelines[0].stages)
    assert any(len(plan.pipelines[0].stages) == 2 for plan in found)
    assert any(len(plan.pipelines) == 2 for plan in found)


@settings(max_examples=60)
@given(data=st.data())
def test_whatever_is_lost_what_is_left_are_plans_within_the_limits(
    data: st.DataObject, make_problem: MakeProblem, make_cluster: MakeCluster
) -> None:
    problem = problem_of(make_problem, make_cluster, EIGHT)
    old = data.draw(plans(problem.cluster.devices, 6, 16))
    spare = data.draw(st.sets(st.sampled_from([node.name for node in problem.cluster.nodes]), max_size=3))
    limits = Limits(spare=tuple(sorted(spare)), max_data_degree=data.draw(st.sampled_from([None, 2])))
    left = replace(problem, limits=limits)
    found = adapted(old, left)
    for plan in found:
        check_is_for(plan, left)
        most = max(run_.data for pipeline in plan.pipelines for stage in pipeline.stages for run_ in stage.layers)
        assert most <= (limits.max_data_degree or most)
    assert len(set(found)) == len(found)
    if set(old.devices) <= set(left.devices) and limits.max_data_degree is None:
        assert found[0] == old


@given(st.integers(1, 40), st.lists(st.floats(0, 10), min_size=1, max_size=8))
def test_parts_in_proportion_are_whole_and_at_least_one(total: int, shares: list[float]) -> None:
    if total < len(shares):
        with pytest.raises(ValueError, match="cannot be split"):
            in_proportion(total, shares)
        return
    found = in_proportion(total, shares)
    assert sum(found) == total
    assert min(found) >= 1
    for (one, share), (other, others) in permutations(zip(found, shares, strict=True), 2):
        assert one >= other or share <= others or abs(one - other) <= 1
