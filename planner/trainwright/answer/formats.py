"""Number format of an answer: the best one, for any search, and the price of a slow one."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from trainwright.accelerators.number_formats import best_format, emulating, equally_fast, format_choices, profiles_in
from trainwright.answer.answer import Answer, SlowFormat
from trainwright.cost.work_bound import work_bound_seconds
from trainwright.exports import is_expressible
from trainwright.layer import Dtype
from trainwright.plan import Plan
from trainwright.search import Candidate, NoFeasiblePlan, Objective, Problem, SearchControl
from trainwright.search.candidates import candidate_of
from trainwright.search.cost_objective import pareto_front, subsampled
from trainwright.search.megatron import megatron

Find = Callable[[Problem, SearchControl], Sequence[Candidate]]

FLOAT32_BYTES: Final = 24
"""Bytes per parameter above which float32 may fit where a half format does not.

With Adam a parameter takes 16 bytes in float32 and 18 in a half format, which needs a float32 copy. Only a device on which
float32's larger activations take less than the two bytes between them is in question, so its state takes most of its memory.
"""


def in_format(problem: Problem, dtype: Dtype, left_out: Iterable[str] = ()) -> Problem:
    """Return the problem in another number format, with profiles scaled by data sheets, without some accelerators.

    Raises ValueError for an accelerator without a data sheet.
    """
    if dtype is not problem.model.dtype:
        own = tuple(layer for layer in problem.profiles.layers if layer.accelerator in problem.accelerators)
        profiles = profiles_in(
            replace(problem.profiles, layers=own),
            problem.model,
            dtype,
            optimizer=problem.optimizer,
            runtime=problem.runtime,
            power_watts=problem.cluster.power_limits,
        )
        problem = replace(problem, model=replace(problem.model, dtype=dtype), profiles=profiles)
    return without(problem, left_out)


def without(problem: Problem, left_out: Iterable[str]) -> Problem:
    """Return the problem whose plans leave out some accelerators."""
    added = tuple(name for name in left_out if name in problem.accelerators)
    if not added:
        return problem
    return replace(problem, limits=replace(problem.limits, spare=(*problem.limits.spare, *added)))


def search_formats(problems: Sequence[Problem], find: Find, control: SearchControl, top: int | None = None) -> Answer:
    """Return the best candidates over all formats that may give the fastest plan, each on its native accelerators.

    `problems` are in the formats that are profiled, the best one first; a single one with estimated profiles is scaled to the
    others by data sheets. Where no plan fits in any of them, float32 is tried, whose state may be smaller. With a limit to one
    trainer these are the trainer's formats; plans without that limit may be in any. Raises NoFeasiblePlan if no plan is
    feasible in any format.
    """
    first = problems[0]
    if len(problems) > 1 or first.profiles.origin == "measured":
        try:
            return search_problems(problems, find, control, top)
        except NoFeasiblePlan:
            smaller = _in_float32(first)
            if smaller is None:
                raise
            return search_problems([smaller], find, control, top)
    scaled = problems_in_formats(first)
    others = [choice for choice in format_choices(first.accelerators) if choice.dtype not in first.limits.dtypes]
    if not others:
        return search_problems(scaled, find, control, top)
    answer = search_problems(scaled, find, control.part(2), top)
    free = replace(first, limits=replace(first.limits, expressible_by=None))
    unlimited: list[Candidate] = []
    for number, choice in enumerate(others):
        other = in_format(free, choice.dtype, choice.left_out)
        if _may_win(other, answer):
            with suppress(NoFeasiblePlan):
                unlimited += find(other, control.part(len(others) - number).apart())[:1]
    return _with_unlimited(answer, unlimited)


def problems_in_formats(problem: Problem) -> list[Problem]:
    """Return a problem with estimated profiles in all formats that may give the fastest plan, its own one first."""
    own = problem.model.dtype
    choices = sorted(
        format_choices(problem.accelerators, problem.limits.dtypes), key=lambda choice: choice.dtype is not own
    )
    problems = [in_format(problem, choice.dtype, choice.left_out) for choice in choices]
    if all(choice.dtype is not Dtype.FLOAT32 for choice in choices) and _is_memory_scarce(problem):
        problems.append(in_format(problem, Dtype.FLOAT32))
    return problems


def _in_float32(problem: Problem) -> Problem | None:
    """Return the problem in float32 by scaled profiles; None where it is already, and without data sheets to scale by."""
    try:
        return None if problem.model.dtype is Dtype.FLOAT32 else in_format(problem, Dtype.FLOAT32)
    except ValueError:
        return None


def _with_unlimited(answer: Answer, others: Iterable[Candidate]) -> Answer:
    """Return the answer, if limited to one trainer, with the least that plans without that limit take.

    `others`: plans in any format, of which those for another batch do not count.
    """
    rows = answer.candidates[0].plan.global_batch_size
    seconds = [
        other.estimate.iteration_seconds if other.unlimited_seconds is None else other.unlimited_seconds
        for other in others
        if other.plan.global_batch_size == rows
    ]
    limited = (
        candidate
        if candidate.unlimited_seconds is None
        else replace(candidate, unlimited_seconds=min((*seconds, candidate.unlimited_seconds)))
        for candidate in answer.candidates
    )
    return replace(answer, candidates=tuple(limited))


def search_problems(problems: Sequence[Problem], find: Find, control: SearchControl, top: int | None = None) -> Answer:
    """Return the best candidates of problems in several formats, without a search where the work bound rules one out.

    Each search gets an equal share of the budget that is left, except those that the heuristic's plans rule out: they come
    last, and get what the others leave. Raises the first problem's NoFeasiblePlan if no problem has a feasible plan.
    """
    answers: list[Answer] = []
    refusal: NoFeasiblePlan | None = None
    likely, unlikely = _by_heuristic(problems) if control.deadline_seconds is not None else (problems, [])
    for number, problem in enumerate((*likely, *unlikely)):
        if not all(_may_win(problem, answer) for answer in answers):
            continue
        part = control.part((len(likely) if number < len(likely) else len(problems)) - number)
        try:
            candidates = find(problem, part)
        except NoFeasiblePlan as refused:
            refusal = refusal or refused
            continue
        answers.append(_labelled(problem, candidates, problems))
    if refusal is not None and not answers:
        raise refusal
    objective = problems[0].limits.objective
    best = min(answers, key=lambda answer: objective_value(answer.best, objective))
    if objective is Objective.PARETO:
        merged = pareto_front(candidate for answer in answers for candidate in answer.candidates)
    else:
        merged = list(
            heapq.merge(
                *(answer.candidates for answer in answers), key=lambda candidate: objective_value(candidate, objective)
            )
        )
    distinct = {
        candidate.plan: candidate for candidate in reversed(merged)
    }  # a plan of several formats counts in its best one
    kept = [candidate for candidate in merged if distinct[candidate.plan] is candidate]
    is_front = objective is Objective.PARETO
    answer = Answer(best.problem, tuple(subsampled(kept, top) if is_front else kept[:top]))
    return _with_unlimited(answer, [candidate for other in answers for candidate in other.candidates])


def _by_heuristic(problems: Sequence[Problem]) -> tuple[list[Problem], list[Problem]]:
    """Return the problems that may have the fastest plan, and those that the work bound and the heuristic's plans rule out."""
    quick: list[Answer] = []
    for problem in problems if len(problems) > 1 else ():
        with suppress(NoFeasiblePlan):
            candidate, capabilities = megatron(problem, SearchControl(), 1)[0], problem.capabilities
            if capabilities is None or is_expressible(candidate.plan, capabilities):
                quick.append(Answer(problem, (candidate,)))
    likely = [each for each in problems if all(_may_win(each, answer) for answer in quick)]
    return likely, [each for each in problems if each not in likely]


def slow_format(
    problem: Problem, candidates: Sequence[Candidate], find: Find, control: SearchControl
) -> SlowFormat | None:
    """Return the price of the problem's format; None if no other one is faster, and all its accelerators compute it natively.

    The search for it ends with the control's budget, and leaves its events alone: they tell how the candidates were found.
    """
    dtype, names = problem.model.dtype, problem.accelerators
    emulated_on, dtypes = emulating(names, dtype), problem.limits.dtypes
    native, best, objective = best_format(names, dtypes), candidates[0], problem.limits.objective
    if not emulated_on and equally_fast(names, dtype, dtypes) is native:
        return None
    other = None
    with suppress(ValueError):  # no data sheet, or no feasible plan
        faster = in_format(problem, native)
        if _may_win(faster, Answer(problem, tuple(candidates))):
            native_best = stating_format(find(faster, control.apart())[0], faster)
            fits = native_best.estimate.feasible or not best.estimate.feasible
            is_faster = objective_value(native_best, objective) < objective_value(best, objective)
            other = native_best if fits and is_faster else None
    if other is None and not emulated_on:
        return None
    return SlowFormat(
        dtype, emulated_on, best.estimate.iteration_seconds, best.plan.global_batch_size, native, other=other
    )


def in_stated_format(problem: Problem, plans: Iterable[Plan]) -> Problem:
    """Return the problem in the number format that plans state, or in its own where they state none.

    Raises ValueError where they state several, or another one than a problem that leaves none open.
    """
    stated = sorted({plan.dtype for plan in plans if plan.dtype is not None})
    if len(stated) > 1:
        raise ValueError(f"there are plans in {' and in '.join(stated)}; give those of one number format")
    own = problem.model.dtype
    if stated in ([], [own]):
        return problem
    if not problem.chooses_format:
        raise ValueError(f"the plan is in {stated[0]}, but the model in {own}; make them equal")
    return in_format(problem, stated[0])


def plan_in_own_format(problem: Problem, plan: Plan) -> Answer:
    """Return a plan in the format that a search would choose for it: the fastest native one of its devices, or float32.

    float32 is chosen where the plan fits into memory in that format alone.
    """
    used = problem.cluster.accelerators_of(plan.nodes)
    answers = []
    for dtype in dict.fromkeys((best_format(used, problem.limits.dtypes), Dtype.FLOAT32)):
        in_own_format = in_format(problem, dtype)
        candidate = replace(candidate_of(in_own_format, plan), dtype=dtype)
        answers.append(Answer(in_own_format, (stating_format(candidate, in_own_format),)))
    return next((answer for answer in answers if answer.candidates[0].estimate.feasible), answers[0])


def stating_format(candidate: Candidate, problem: Problem) -> Candidate:
    """Return the candidate with a plan that states its number format."""
    dtype = candidate.dtype or problem.model.dtype
    return replace(candidate, plan=replace(candidate.plan, dtype=dtype))


def slow_format_of(problem: Problem, plan: Plan) -> SlowFormat | None:
    """Return the price of the problem's format for a given plan, on the plan's devices, as `slow_format`."""
    used = problem.with_nodes(plan.nodes)
    return slow_format(used, [candidate_of(used, plan)], lambda other, _: [candidate_of(other, plan)], SearchControl())


def _labelled(problem: Problem, candidates: Sequence[Candidate], others: Sequence[Problem]) -> Answer:
    """Return the candidates, each in its preferred format and with the estimate in that format.

    Formats of equal rates differ in the optimizer's step: float16 unscales gradients. A plan that does not fit in the preferred
    format keeps the problem's. `others`: problems in further formats.
    """
    own = problem.model.dtype
    problems = {other.model.dtype: other for other in others} | {own: problem}
    labelled = []
    for candidate in candidates:
        dtype = _label(candidate, problem)
        if dtype not in problems:
            problems[dtype] = in_format(problem, dtype, emulating(problem.accelerators, dtype))
        estimate = candidate.estimate if dtype is own else candidate_of(problems[dtype], candidate.plan).estimate
        fits = estimate.feasible or dtype is own
        labelled.append(replace(candidate, dtype=dtype, estimate=estimate) if fits else replace(candidate, dtype=own))
    return Answer(problems[labelled[0].dtype or own], tuple(labelled))


def _label(candidate: Candidate, problem: Problem) -> Dtype:
    """Return the preferred one of the formats that are as fast as the problem's on the plan's accelerators."""
    used = problem.cluster.accelerators_of(candidate.plan.nodes)
    return equally_fast(used, problem.model.dtype, problem.limits.dtypes)


def objective_value(candidate: Candidate, objective: Objective) -> float:
    """Return what the objective minimises, for one row."""
    if objective is Objective.COST and candidate.price_per_row is not None:
        return candidate.price_per_row
    return candidate.estimate.iteration_seconds / candidate.plan.global_batch_size


def _may_win(problem: Problem, answer: Answer) -> bool:
    """Return whether the work bound leaves room for a plan that is faster than the answer's best."""
    best = answer.candidates[0]
    if problem.limits.objective is not Objective.TIME or best.plan.global_batch_size != problem.global_batch_size:
        return True
    bound = work_bound_seconds(problem.cost_context, problem.nodes, problem.global_batch_size)
    return bound < best.estimate.iteration_seconds


def _is_memory_scarce(problem: Problem) -> bool:
    free = 1 - problem.limits.headroom
    memory = min(
        (
            each.memory_bytes * free - problem.runtime.constant_bytes_of(each.name)
            for each in problem.cluster.accelerators
        ),
        default=math.inf,
    )
    return problem.model.parameters * FLOAT32_BYTES > memory
