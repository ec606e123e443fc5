"""Number formats: which are searched on a pool, the one that is chosen, and the price of a slow one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.accelerators import best_format, cluster_of, estimate_profiles, format_choices, is_native
from trainwright.answer.formats import in_format, search_formats, search_problems, slow_format, slow_format_of
from trainwright.exports import TARGETS
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.runtime import Runtime
from trainwright.runtime_presets import runtime_preset
from trainwright.search import Candidate, Limits, NoFeasiblePlan, Objective, Problem, SearchControl, run

FLOAT32, FLOAT16, BFLOAT16 = Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16
V100, T4, A100 = "Tesla-V100-SXM2-16GB", "Tesla-T4", "NVIDIA-A100-SXM4-40GB"
SMALL = Gpt(layers=4, hidden_size=1024, heads=8, sequence_length=512, vocabulary_size=8192)
TORCHTITAN = TARGETS["torchtitan"].capabilities
MACHINES = ("p3.8xlarge", "g4dn.12xlarge", "a2-highgpu-4g", "g5.12xlarge")
MIXED = {"p3.8xlarge": 1, "g4dn.12xlarge": 1, "a2-highgpu-4g": 1}


def problem_in(dtype: Dtype, machines: dict[str, int], batch: int = 32, runtime: Runtime | None = None) -> Problem:
    model, cluster = Model.of(SMALL, dtype), cluster_of(machines)
    names = [accelerator.name for accelerator in cluster.accelerators]
    profiles = estimate_profiles(model, names, tensor_degrees=(1, 2, 4), rows=(1, 4, 16, 64), runtime=runtime)
    return Problem(cluster, model, profiles, batch, runtime=runtime or Runtime())


def megatron(problem: Problem, control: SearchControl | None = None) -> list[Candidate]:
    return run("megatron", problem, top=3, control=control)


class Counted:
    """Search that records the formats that it is asked for."""

    def __init__(self) -> None:
        self.asked = list[Dtype]()

    def __call__(self, problem: Problem, control: SearchControl) -> list[Candidate]:
        self.asked.append(problem.model.dtype)
        return megatron(problem, control)


@pytest.mark.parametrize(
    ("accelerators", "found"),
    [
        ([A100], [(BFLOAT16, ())]),
        ([V100, T4], [(FLOAT16, ())]),
        ([V100, A100, T4], [(FLOAT16, ())]),
        (["emulated-a", "emulated-b"], [(FLOAT32, ())]),
        (["emulated-a", A100], [(BFLOAT16, ("emulated-a",)), (FLOAT32, ())]),
        (["New"], [(BFLOAT16, ()), (FLOAT16, ()), (FLOAT32, ())]),
        (["New", V100], [(BFLOAT16, (V100,)), (FLOAT16, ()), (FLOAT32, ())]),
    ],
)
def test_only_formats_that_may_win_are_searched(
    accelerators: list[str], found: list[tuple[Dtype, tuple[str, ...]]]
) -> None:
    assert [(choice.dtype, choice.left_out) for choice in format_choices(accelerators)] == found


@pytest.mark.parametrize(
    ("accelerators", "found"),
    [([V100, T4], [(FLOAT32, ())]), ([A100], [(BFLOAT16, ())]), ([V100, A100], [(BFLOAT16, (V100,)), (FLOAT32, ())])],
)
def test_only_formats_of_the_trainer_are_searched(
    accelerators: list[str], found: list[tuple[Dtype, tuple[str, ...]]]
) -> None:
    choices = format_choices(accelerators, TORCHTITAN.dtypes)
    assert [(choice.dtype, choice.left_out) for choice in choices] == found


def test_plans_without_the_limit_to_one_trainer_may_be_in_a_format_that_it_lacks() -> None:
    problem = problem_in(FLOAT32, {"p3.8xlarge": 1}, batch=256)
    limited = replace(problem, limits=Limits(expressible_by=TORCHTITAN))
    found = search_formats([limited], megatron, SearchControl(), 3)
    in_half = megatron(in_format(problem, FLOAT16))[0].estimate.iteration_seconds
    assert {one.dtype for one in found.candidates} == {FLOAT32}
    assert {one.unlimited_seconds for one in found.candidates} == {in_half}
    assert in_half < found.candidates[0].estimate.iteration_seconds


@examples(8)
@given(machines=st.sets(st.sampled_from(MACHINES), min_size=1, max_size=2))
def test_chosen_format_is_native_on_the_plan_and_no_named_one_is_faster(machines: set[str]) -> None:
    counts = dict.fromkeys(sorted(machines), 1)
    cluster = cluster_of(counts)
    find = Counted()
    answer = search_formats(
        [problem_in(best_format([one.name for one in cluster.accelerators]), counts)], find, SearchControl(), 3
    )
    best = answer.candidates[0]
    assert best.dtype is not None
    assert len(find.asked) == 1
    assert all(is_native(cluster.node(node).accelerator, best.dtype) for node in best.plan.nodes)
    named = [megatron(problem_in(dtype, counts))[0].estimate.iteration_seconds for dtype in Dtype]
    assert best.estimate.iteration_seconds <= min(named) * (1 + 1e-9)
    # Scaled profiles are those of the other format, so the price of a slow format is what a search in it finds.
    slow = problem_in(BFLOAT16, counts)
    price = slow_format(slow, megatron(slow), megatron, SearchControl())
    assert (price is None) == all(is_native(one.name, BFLOAT16) for one in cluster.accelerators)
    if price is not None and price.other is not None:
        assert price.other.estimate.iteration_seconds == pytest.approx(best.estimate.iteration_seconds)


def test_plan_on_ampere_alone_is_in_bfloat16_although_the_pool_has_other_devices() -> None:
    mixed = problem_in(FLOAT16, MIXED)
    (ampere,) = (node.name for node in mixed.cluster.nodes if node.accelerator == A100)
    answer = search_formats(
        [mixed], lambda one, control: [*megatron(one.with_nodes([ampere])), *megatron(one)], SearchControl()
    )
    assert {candidate.dtype for candidate in answer.candidates if candidate.plan.nodes == (ampere,)} == {BFLOAT16}
    assert FLOAT16 in {candidate.dtype for candidate in answer.candidates}


def test_price_of_a_slow_format_names_the_devices_and_the_faster_plan() -> None:
    problem = problem_in(BFLOAT16, {"p3.8xlarge": 1, "g4dn.12xlarge": 1})
    slow = slow_format(problem, found := megatron(problem), megatron, SearchControl())
    assert slow is not None
    assert slow.other is not None
    assert (slow.dtype, slow.native, set(slow.emulated_on)) == (BFLOAT16, FLOAT16, {V100, T4})
    assert slow.seconds == found[0].estimate.iteration_seconds > 1.3 * slow.other.estimate.iteration_seconds
    same = slow_format_of(problem, found[0].plan)
    assert same is not None
    assert same.other is not None
    assert same.other.plan == replace(found[0].plan, dtype=FLOAT16)


def test_format_that_is_native_everywhere_has_no_price() -> None:
    problem = problem_in(BFLOAT16, {"a2-highgpu-4g": 1})
    assert slow_format(problem, megatron(problem), Counted(), SearchControl()) is None
    mixed = problem_in(BFLOAT16, MIXED)
    (ampere,) = (node.name for node in mixed.cluster.nodes if node.accelerator == A100)
    assert slow_format_of(mixed, megatron(mixed.with_nodes([ampere]))[0].plan) is None


def test_second_format_is_not_searched_when_the_work_bound_rules_it_out() -> None:
    half, full = problem_in(FLOAT16, {"p3.8xlarge": 1}), problem_in(FLOAT32, {"p3.8xlarge": 1})
    find = Counted()
    assert search_problems([half, full], find, SearchControl()).problem is half
    assert find.asked == [FLOAT16]
    find = Counted()
    assert search_problems([full, half], find, SearchControl()).problem is half
    assert find.asked == [FLOAT32, FLOAT16]


def problems_for(objective: Objective, *dtypes: Dtype) -> list[Problem]:
    """Return problems of which no work bound rules one out unless the objective is time."""
    problems = [problem_in(dtype, MIXED) for dtype in dtypes]
    return [replace(one, limits=replace(one.limits, objective=objective)) for one in problems]


@pytest.mark.parametrize("objective", Objective)
def test_candidates_of_several_formats_are_merged_best_first(objective: Objective) -> None:
    problems = problems_for(objective, BFLOAT16, FLOAT16)
    answer = search_problems(problems, megatron, SearchControl())
    apart = [found for problem in problems for found in megatron(problem)]
    seconds = [one.estimate.iteration_seconds for one in answer.candidates]
    prices = [one.price_per_row or 0.0 for one in answer.candidates]
    if objective is not Objective.COST:
        assert seconds == sorted(seconds)
        assert seconds[0] == min(one.estimate.iteration_seconds for one in apart)
    if objective is not Objective.TIME:
        assert min(prices) == min(one.price_per_row or 0.0 for one in apart)


def test_front_of_several_formats_keeps_its_cheapest_plan_when_it_is_shortened() -> None:
    def front(problem: Problem, control: SearchControl) -> list[Candidate]:
        return [
            replace(one, price_per_hour=9.0 / 4**rank)
            for rank, one in enumerate(run("megatron", time, top=3, control=control))
        ]

    (time,) = problems_for(Objective.TIME, FLOAT16)
    problems = problems_for(Objective.PARETO, FLOAT16, BFLOAT16)
    whole = search_problems(problems, front, SearchControl()).candidates
    assert len(whole) > 2
    assert search_problems(problems, front, SearchControl(), 2).candidates == (whole[0], whole[-1])


def test_each_format_gets_an_equal_share_of_the_budget_that_is_left() -> None:
    now, shares, spent = [100.0], list[float](), iter((1.0, 4.0, 0.0))

    def find(problem: Problem, control: SearchControl) -> list[Candidate]:
        assert control.deadline_seconds is not None
        shares.append(control.deadline_seconds - now[0])
        found = megatron(problem, control)
        now[0] += next(spent)
        return found

    control = SearchControl.with_budget(9.0, clock=lambda: now[0])
    search_problems(problems_for(Objective.COST, *Dtype), find, control)
    assert shares == pytest.approx([3.0, 4.0, 4.0])
    assert not control.budget_exhausted.is_set()


@pytest.mark.parametrize("dtypes", [(FLOAT16, FLOAT32), (FLOAT32, FLOAT16)])
def test_format_that_the_heuristic_rules_out_gets_no_share_of_the_budget(dtypes: tuple[Dtype, ...]) -> None:
    asked = dict[Dtype, float | None]()

    def find(problem: Problem, control: SearchControl) -> list[Candidate]:
        asked[problem.model.dtype] = control.deadline_seconds
        return megatron(problem, control)

    control = SearchControl.with_budget(8.0, clock=lambda: 100.0)
    problems = [problem_in(dtype, {"p3.8xlarge": 1}) for dtype in dtypes]
    assert search_problems(problems, find, control).problem.model.dtype is FLOAT16
    assert asked == {FLOAT16: 108.0}


def test_format_that_the_heuristic_alone_rules_out_gets_what_is_left_of_the_budget() -> None:
    asked = dict[Dtype, float | None]()

    def find(problem: Problem, control: SearchControl) -> list[Candidate]:
        asked[problem.model.dtype] = control.deadline_seconds
        found = megatron(problem, control)
        slow = replace(found[0].estimate, iteration_seconds=1e3)
        return [replace(one, estimate=slow) for one in found] if problem.model.dtype is FLOAT16 else found

    control = SearchControl.with_budget(8.0, clock=lambda: 100.0)
    problems = [problem_in(dtype, {"p3.8xlarge": 1}) for dtype in (FLOAT32, FLOAT16)]
    assert search_problems(problems, find, control).problem.model.dtype is FLOAT32
    assert asked == {FLOAT16: 108.0, FLOAT32: 108.0}


def test_answer_is_stopped_by_its_budget_when_one_format_is_and_not_when_a_price_is() -> None:
    def stopped(problem: Problem, control: SearchControl) -> list[Candidate]:
        control.expired()
        return megatron(problem, control)

    control = SearchControl(deadline_seconds=0.0)
    slow = problem_in(BFLOAT16, {"p3.8xlarge": 1})
    assert slow_format(slow, megatron(slow), stopped, control) is not None
    assert not control.budget_exhausted.is_set()
    search_problems([slow], stopped, control)
    assert control.budget_exhausted.is_set()


def test_float32_is_searched_when_memory_is_scarce_and_no_half_format_fits() -> None:
    problem = problem_in(FLOAT16, {"p3.8xlarge": 1})

    def find(one: Problem, control: SearchControl) -> list[Candidate]:
        if one.model.dtype is not FLOAT32:
            raise NoFeasiblePlan("too large")
        return megatron(one, control)

    with pytest.raises(NoFeasiblePlan, match="too large"):
        search_formats([problem], find, SearchControl())
    accelerators = tuple(replace(one, memory_bytes=10**9) for one in problem.cluster.accelerators)
    scarce = replace(problem, cluster=replace(problem.cluster, accelerators=accelerators))
    assert search_formats([scarce], find, SearchControl()).candidates[0].dtype is FLOAT32


@pytest.mark.parametrize("runtime", [Runtime(), runtime_preset("torchtitan").runtime])
@pytest.mark.parametrize("other_dtype", [FLOAT32, FLOAT16])
def test_scaled_profiles_are_those_of_the_other_format(runtime: Runtime, other_dtype: Dtype) -> None:
    scaled, wanted = (
        in_format(problem_in(BFLOAT16, MIXED, runtime=runtime), other_dtype),
        problem_in(other_dtype, MIXED, runtime=runtime),
    )
    known = {(one.accelerator, one.kind, one.tensor_degree, one.rows): one for one in wanted.profiles.layers}
    for one in scaled.profiles.layers:
        other = known[one.accelerator, one.kind, one.tensor_degree, one.rows]
        assert one.forward_seconds == pytest.approx(other.forward_seconds)
        assert one.backward_seconds == pytest.approx(other.backward_seconds)
        assert one.update_seconds == pytest.approx(other.update_seconds)
        assert (one.activation_bytes, one.parameter_bytes) == (other.activation_bytes, other.parameter_bytes)


def test_profiles_of_other_layers_and_accelerators_do_not_hinder_the_price() -> None:
    problem = problem_in(BFLOAT16, {"p3.8xlarge": 1})
    layers = problem.profiles.layers
    others = (replace(layers[0], kind="of another model"), replace(layers[0], accelerator="New"))
    with_others = replace(problem, profiles=replace(problem.profiles, layers=(*layers, *others)))
    candidates = megatron(problem)
    assert slow_format(with_others, candidates, megatron, SearchControl()) == slow_format(
        problem, candidates, megatron, SearchControl()
    )
