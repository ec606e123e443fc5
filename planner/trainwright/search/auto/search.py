"""Search for unequal devices, `auto`: its entry point and its phases."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from trainwright.plan import Plan, divisors
from trainwright.search.auto.bottleneck_starts import bottleneck_balanced_plans
from trainwright.search.auto.budget import (
    LARGE_CLUSTER,
    LARGE_SUBCLUSTER,
    LARGE_TENSOR_GROUPS,
    MANY_STAGES,
    MEDIUM_CLUSTER,
    MEDIUM_CLUSTER_DEVICES,
    SMALL_CLUSTER,
    SMALL_CLUSTER_DEVICES,
    SUBCLUSTER,
    SearchBudget,
)
from trainwright.search.auto.diversity import (
    MAX_SHAPES,
    NEAR_BEST_RATIO,
    best_of_each_shape,
    distinct,
    with_tensor_degree,
)
from trainwright.search.auto.drafts import Draft as LineDraft
from trainwright.search.auto.drafts import DraftGenerator
from trainwright.search.auto.layer_rebalancing import with_sharding
from trainwright.search.auto.local_search import IteratedLocalSearch, local_search
from trainwright.search.auto.memory_first_starts import least_memory_plans, memory_balanced_plans
from trainwright.search.auto.neighbourhood.strategy_moves import other_schedules
from trainwright.search.auto.search_state import PHASE_STEPS, USUAL_COMPUTE_ESTIMATE_RATIO, SearchState, max_evaluations
from trainwright.search.auto.seeds import amp_candidates, late_candidates, warm_start_candidates
from trainwright.search.auto.subclusters import subclusters_of_fewer_devices, subclusters_of_fewer_nodes
from trainwright.search.candidates import LazyCandidate, best_of, fastest_first, fitting_candidate
from trainwright.search.megatron import megatron, megatron_candidates
from trainwright.search.plan_variants import gathering_in_every_pass
from trainwright.search.preference.plan_adaptation import adapt_plan
from trainwright.search.problem import Candidate, NoFeasiblePlan, Problem, SearchControl
from trainwright.search.uniform.plan_space import (
    UniformPlanSpace,
    check_profiled,
    exceeds_all_memory,
    infeasibility_error,
)
from trainwright.strategy import Sharding


def initial_solutions(state: SearchState) -> None:
    """Evaluate the first plans: Megatron's or, if none fits, memory-balanced ones; Megatron's on each accelerator; then AMP's.

    If memory is short, bottleneck-balanced plans are evaluated too.
    """
    if not _try_megatron(state):
        _try_memory_first_plans(state)
    _try_megatron_on_each_accelerator(state)
    if state.feasible_candidates:
        state.report_progress(0)
    for plan in (
        bottleneck_balanced_plans(state.problem) if state.is_short_of_memory and not state.is_out_of_time else ()
    ):
        state.evaluator.evaluate(plan)
        state.report_progress(0)
    if not state.is_out_of_time:
        for candidate in amp_candidates(
            state.problem, state.control, lambda: state.is_out_of_time, lambda best: state.report_progress(0, best)
        ):
            state.evaluator.add(candidate)
        state.report_progress(0)


def _try_megatron(state: SearchState) -> bool:
    """Add Megatron's best plan and return whether one fits. The first feasible one is reported at once."""
    lazy_candidates: list[LazyCandidate] = []
    for lazy_candidate in megatron_candidates(UniformPlanSpace.of(state.problem), state.control):
        if not lazy_candidates and (first := fitting_candidate(state.problem, lazy_candidate.build_plan())) is not None:
            state.provisional = [first]
            state.report_progress(0)
        lazy_candidates.append(lazy_candidate)
    if not lazy_candidates:
        return False
    state.evaluator.add(best_of(state.problem, lazy_candidates, SearchControl(), 1)[0])
    state.provisional = []
    return True


def _try_megatron_on_each_accelerator(state: SearchState) -> None:
    """Add what a person would run on the best part of the cluster, whatever the budget."""
    names = state.problem.accelerators
    for name in names if len(names) > 1 else ():
        with suppress(NoFeasiblePlan):
            state.evaluator.add(megatron(state.problem.on_accelerator(name), SearchControl(), 1)[0])


def _try_memory_first_plans(state: SearchState) -> None:
    for plan in memory_balanced_plans(state.problem):
        state.evaluator.evaluate(plan)
        state.report_progress(0)


MAX_EVALUATED_DRAFTS = 48
"""Maximum number of drafts costed exactly; a plan that does not fit counts as a fraction."""
MIN_EVALUATED_DRAFTS = 4
"""Number of drafts costed even after the deadline, so that the DP's work is not lost."""


def draft_plans(state: SearchState) -> None:
    """Run the DP over all micro-batch sizes with the budgets that suit the cluster, then evaluate the drafts."""
    for budget in _budgets(state):
        collect_drafts(state, DraftGenerator(state.problem, budget), divisors(state.problem.global_batch_size))
        evaluate_drafts(state)


def collect_drafts(state: SearchState, generator: DraftGenerator, sizes: Sequence[int]) -> None:
    """Collect drafts until all lines and sizes are searched or time is up."""
    for drafts, share in generator.steps(sizes):
        if drafts and state.has_no_plan:
            state.evaluator.evaluate(drafts[0][1])
        state.drafts += drafts
        state.report_progress(int(PHASE_STEPS * share / 2))
        if state.is_out_of_time:
            break


def evaluate_drafts(state: SearchState) -> None:
    """Evaluate the best drafts, starting with the best of each stage count and of each micro-batch size."""
    drafts = _drafts_best_first(state)
    best_by_shape: dict[object, Plan] = {}
    for plan in drafts:
        best_by_shape.setdefault(tuple(len(pipeline.stages) for pipeline in plan.pipelines), plan)
        best_by_shape.setdefault(plan.pipelines[0].micro_batch_size, plan)
    max_evaluations = draft_evaluation_limit(state)
    for plans, count in ((best_by_shape.values(), max_evaluations // 2), (drafts, max_evaluations)):
        # Different lines often yield the same draft, which is costed and counted once.
        stop_at = state.evaluator.remaining_evaluations - count
        for number, plan in enumerate(plans):
            if state.evaluator.remaining_evaluations <= stop_at or (
                state.is_out_of_time and number >= MIN_EVALUATED_DRAFTS
            ):
                break
            # The DP only approximates memory, so a draft may need more recompute.
            state.evaluator.evaluate_repaired(plan)


def draft_evaluation_limit(state: SearchState) -> int:
    """Return the maximum number of evaluations for plans of one origin."""
    return min(MAX_EVALUATED_DRAFTS, int(state.evaluator.remaining_evaluations / 5))


def closest_draft_error(state: SearchState) -> NoFeasiblePlan:
    """Return an error that names the plan closest to fitting of the drafts, uniform plans, and those that need least memory."""
    drafts = _drafts_best_first(state)[:MAX_EVALUATED_DRAFTS]
    uniform = UniformPlanSpace.of(state.problem).plans_ignoring_memory()
    return infeasibility_error(state.problem, chain(drafts or uniform, least_memory_plans(state.problem)))


def _drafts_best_first(state: SearchState) -> list[Plan]:
    return [plan for _, plan in sorted(state.drafts, key=lambda draft: draft[0])]


def _budgets(state: SearchState) -> Iterator[SearchBudget]:
    if state.is_small_cluster:
        yield SMALL_CLUSTER
    elif state.is_short_of_memory:
        yield MANY_STAGES
    else:
        yield MEDIUM_CLUSTER if len(state.problem.devices) <= MEDIUM_CLUSTER_DEVICES else LARGE_CLUSTER
        if state.has_no_plan:
            yield MANY_STAGES
    if not state.drafts and not state.has_no_plan and not state.is_out_of_time:
        yield LARGE_TENSOR_GROUPS


def refine_stage_count(state: SearchState) -> None:
    """Rerun the DP with finer blocks, at nearby smaller micro-batch sizes, if a leading plan has many stages."""
    if state.is_short_of_memory or state.is_small_cluster or state.has_no_plan or state.is_out_of_time:
        return
    max_seconds = state.best_seconds * NEAR_BEST_RATIO
    many_stage_pipelines = [
        candidate.plan.pipelines[0]
        for candidate in best_of_each_shape(state.evaluator.feasible())[
            : MAX_SHAPES if len(state.problem.devices) <= MEDIUM_CLUSTER_DEVICES else 1
        ]
        if candidate.estimate.iteration_seconds <= max_seconds
        and len(candidate.plan.pipelines[0].stages) > MEDIUM_CLUSTER.coarse.blocks // 2
    ]
    if many_stage_pipelines:
        sizes = divisors(state.problem.global_batch_size)
        size_index = max(index for index, size in enumerate(sizes) if size <= many_stage_pipelines[0].micro_batch_size)
        collect_drafts(
            state,
            DraftGenerator(state.problem, MANY_STAGES, includes_multi_pipeline=False),
            sizes[max(size_index - 2, 0) : size_index + 1],
        )
        evaluate_drafts(state)


_MAX_EVALUATIONS = 300
"""Maximum evaluations of local search from an adopted plan, at effort 1."""


def adopt_better_incumbents(state: SearchState) -> None:
    """Run the late searches, and run local search from each plan that beats the incumbent."""
    for candidate in late_candidates(state.problem, state.control, lambda: state.is_out_of_time):
        if state.has_no_plan or candidate.estimate.iteration_seconds < state.best_seconds:
            state.evaluator.add(candidate)
            max_evaluations = int(_MAX_EVALUATIONS * state.control.effort)
            with state.with_extra_evaluations(max_evaluations):
                local_search(candidate, state.evaluator, max_evaluations)


COSTED_PER_PART = 4
"""Extra evaluations for each subcluster with fewer devices per node."""


def search_subclusters(state: SearchState) -> None:
    """Draft plans on subclusters, with finer blocks, if the best plan is far from the compute estimate."""
    if state.is_small_cluster or not state.is_far_from_compute_estimate:
        return
    draft_count = len(state.drafts)
    for subproblem in subclusters_of_fewer_nodes(state.compute_estimate, state.best_seconds):
        if state.is_out_of_time:
            break
        _draft_subcluster(state, subproblem)
    for subproblem in subclusters_of_fewer_devices(state.compute_estimate, state.best_seconds):
        if state.is_out_of_time:
            break
        _evaluate_best_draft(state, _draft_subcluster(state, subproblem))
    if len(state.drafts) > draft_count:
        evaluate_drafts(state)


def _draft_subcluster(state: SearchState, subproblem: Problem) -> Sequence[LineDraft]:
    """Add the subcluster's drafts to the state and return them."""
    draft_count = len(state.drafts)
    budget = SUBCLUSTER if len(subproblem.devices) <= SMALL_CLUSTER_DEVICES else LARGE_SUBCLUSTER
    collect_drafts(state, DraftGenerator(subproblem, budget), divisors(state.problem.global_batch_size))
    return state.drafts[draft_count:]


def _evaluate_best_draft(state: SearchState, drafts: Sequence[LineDraft]) -> None:
    """Evaluate the best draft, with and without ZeRO-2."""
    if drafts:
        _, best = min(drafts, key=lambda draft: draft[0])
        with state.with_extra_evaluations(COSTED_PER_PART):
            for plan in (best, with_sharding(best, Sharding.ZERO2)):
                state.evaluator.evaluate_repaired(plan)


WARM_START_RATIO = 1.25
"""Ratio to the best seconds up to which another search's plans are of use: their variants (`plan_variants`) may be as much faster."""


def warm_start(state: SearchState) -> None:
    """Evaluate adaptations of the running plan and the best plans of other searches."""
    if state.problem.preference.keep is not None:
        for plan in adapt_plan(state.problem.preference.keep.without_operators, state.problem)[
            : draft_evaluation_limit(state)
        ]:
            state.evaluator.evaluate_repaired(gathering_in_every_pass(plan))
    max_seconds = math.inf if state.has_no_plan else state.best_seconds * WARM_START_RATIO
    control = replace(state.control, max_seconds=max_seconds)
    for candidate in warm_start_candidates(state.problem, control, lambda: state.is_out_of_time):
        state.evaluator.add(candidate)


def add_alternatives(state: SearchState) -> None:
    """Evaluate the incumbent at each uniform tensor degree; on many devices, where local search is short, the best of each shape."""
    max_tensor_degree = max((node.devices for node in state.problem.cluster.nodes), default=1)
    feasible = state.evaluator.feasible()
    is_large = len(state.problem.devices) > MEDIUM_CLUSTER_DEVICES
    best = best_of_each_shape(feasible) if is_large else fastest_first(feasible)[:1]
    others = [other for candidate in best for other in with_tensor_degree(candidate.plan, max_tensor_degree)]
    state.evaluator.remaining_evaluations = max(state.evaluator.remaining_evaluations, len(others))
    for plan in others:
        state.evaluator.evaluate(plan)


def best_in_other_schedules(state: SearchState) -> list[Plan]:
    """Return the best plans of distinct shapes, each in the schedules it does not use."""
    best = [candidate.plan for candidate in fastest_first(state.evaluator.feasible())[:MAX_SHAPES]]
    return [replace(plan, schedule=other) for plan in best for other in other_schedules(plan)]


FIRST_ROUND_RATIO = 1 / 12
"""Share of all evaluations spent near each leader before the best of them are searched further."""


def improve_incumbents(state: SearchState) -> None:
    """Run local search from the leading shapes, then spend the rest on iterated local search.

    A short first round from each leader decides which of them are searched further.
    """
    _extend_budget(state)
    for plan in best_in_other_schedules(state):
        state.evaluator.evaluate(plan)
    evaluator, initial_evaluations = state.evaluator, max(state.evaluator.remaining_evaluations, 1.0)
    for incumbent in best_of_each_shape(evaluator.feasible()):
        local_search(incumbent, evaluator, initial_evaluations * FIRST_ROUND_RATIO)
        _report_spent_budget(state, initial_evaluations)
    for incumbent in best_of_each_shape(evaluator.feasible()):
        if evaluator.is_exhausted:
            return
        local_search(incumbent, evaluator, evaluator.remaining_evaluations / 2)
        _report_spent_budget(state, initial_evaluations)
    if not state.has_no_plan:
        for _ in IteratedLocalSearch(evaluator, state.control.seed).steps(fastest_first(evaluator.feasible())[0]):
            _report_spent_budget(state, initial_evaluations)


def _extend_budget(state: SearchState) -> None:
    """Raise the evaluation budget, up to that of small problems, if the best plan is far from the compute estimate."""
    if state.is_far_from_compute_estimate:
        extended = min(
            state.evaluator.remaining_evaluations * state.compute_estimate_ratio / USUAL_COMPUTE_ESTIMATE_RATIO,
            max_evaluations(len(state.problem.devices)) * state.control.effort,
        )
        state.evaluator.remaining_evaluations = max(state.evaluator.remaining_evaluations, extended)


def _report_spent_budget(state: SearchState, initial_evaluations: float) -> None:
    """Report progress as the share of `initial_evaluations` that is spent."""
    state.report_progress(
        PHASE_STEPS + int(PHASE_STEPS * (1 - max(state.evaluator.remaining_evaluations, 0.0) / initial_evaluations))
    )


def auto(problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
    """Search plans of any shape that the plan document expresses; return the best of each choice, fastest first by exact replay.

    A DP (`layer_device_dp`) cuts layers and device lines (`device_lines`) into stages together, for each micro-batch size.
    Each stage gets the degrees, sharding and recompute that suit its devices (`stage_options`); rows follow device speed.
    Node kinds may also form separate pipelines (`drafts`), and subclusters are tried where links are slow (`subclusters`).
    The best drafts and the plans of other searches (`seeds`) are costed exactly, with more recompute where memory is short,
    and improved by local search (`local_search`, `neighbourhood`) that rebalances layers after moves (`layer_rebalancing`).
    Results are deterministic for a seed unless a time budget applies.

    Raises:
        NoFeasiblePlan: nothing fits; the error names the closest plan.
    """
    check_profiled(problem)
    if exceeds_all_memory(problem):
        raise infeasibility_error(problem, least_memory_plans(problem))
    state = SearchState.of(problem, control)
    for phase in (
        initial_solutions,
        draft_plans,
        warm_start,
        refine_stage_count,
        search_subclusters,
        improve_incumbents,
        adopt_better_incumbents,
        add_alternatives,
    ):
        phase(state)
    if not state.feasible_candidates:
        raise closest_draft_error(state)
    state.report_progress(2 * PHASE_STEPS)
    return distinct(fastest_first(state.feasible_candidates))[:top]
