"""Search of the number format, for any search, and the price of a slow one."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from trainwright.accelerators.number_formats import (
    best_format,
    emulating,
    equally_fast,
    format_choices,
    profiles_in,
)
from trainwright.cost.work_bound import work_bound_seconds
from trainwright.exports import is_expressible
from trainwright.layer import Dtype
from trainwright.plan import Plan
from trainwright.search.candidates import candidate_of
from trainwright.search.cost_objective import pareto_front, subsampled
from trainwright.search.megatron import megatron
from trainwright.search.problem import Candidate, NoFeasiblePlan, Objective, Problem, SearchControl

Find = Callable[[Problem, SearchControl], Sequence[Candidate]]

FLOAT32_BYTES: Final = 24
"""Bytes per parameter above which float32 may fit where a half format does not.

With Adam a parameter takes 16 bytes in float32 and 18 in a half format, which needs a float32 copy. Only a device on which
float32's larger activations take less than the two bytes between them is in question, so its state takes most of its memory.
"""


@dataclass(frozen=True, slots=True)
class SlowFormat:
    """Format that was asked for by name although some accelerators only emulate it.

    Attributes:
        seconds, rows: iteration and global batch of the best plan.
        other: best plan in the fastest native format; None if it is not faster, or without a data sheet of an accelerator.
    """

    dtype: Dtype
    emulated_on: tuple[str, ...]
    seconds: float
    rows: int
    native: Dtype
    other: Candidate | None


@dataclass(frozen=True, slots=True)
class FormatAnswer:
    """Candidates of one or several number formats, best first, with the problem of the best one.

    Attributes:
        slow: price of the format, if it was asked for by name and some accelerators only emulate it.
    """

    problem: Problem
    candidates: tuple[Candidate, ...]
    slow: SlowFormat | None = None


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


def search_formats(problem: Problem, find: Find, control: SearchControl, top: int | None = None) -> FormatAnswer:
    """Return the best candidates over all formats that may give the fastest plan, each on its native accelerators.

    `problem` is in the best format of all its accelerators. Its measured profiles hold for that format alone. With a limit to
    one trainer these are the trainer's formats; plans without that limit may be in any. Raises NoFeasiblePlan if no plan is
    feasible in any format.
    """
    if problem.profiles.origin == "measured":
        return search_problems([problem], find, control, top)
    own, allowed = problem.model.dtype, problem.limits.dtypes
    choices = sorted(format_choices(problem.accelerators, allowed), key=lambda choice: choice.dtype is not own)
    problems = [in_format(problem, choice.dtype, choice.left_out) for choice in choices]
    if all(choice.dtype is not Dtype.FLOAT32 for choice in choices) and _is_memory_scarce(problem):
        problems.append(in_format(problem, Dtype.FLOAT32))
    others = [choice for choice in format_choices(problem.accelerators) if choice.dtype not in allowed]
    if not others:
        return search_problems(problems, find, control, top)
    answer = search_problems(problems, find, control.part(2), top)
    free = replace(problem, limits=replace(problem.limits, expressible_by=None))
    unlimited: list[Candidate] = []
    for number, choice in enumerate(others):
        other = in_format(free, choice.dtype, choice.left_out)
        if _may_win(other, answer):
            with suppress(NoFeasiblePlan):
                unlimited += find(other, control.part(len(others) - number).apart())[:1]
    return _with_unlimited(answer, unlimited)


def _with_unlimited(answer: FormatAnswer, others: Iterable[Candidate]) -> FormatAnswer:
    """Return the answer, if limited to one trainer, with the least that plans without that limit take.

    `others`: plans in any format, of which those for another batch do not count.
    """
    rows = answer.candidates[0].plan.global_batch_size
    seconds = [
        one.estimate.iteration_seconds if one.unlimited_seconds is None else one.unlimited_seconds
        for one in others
        if one.plan.global_batch_size == rows
    ]
    limited = (
        one if one.unlimited_seconds is None else replace(one, unlimited_seconds=min((*seconds, one.unlimited_seconds)))
        for one in answer.candidates
    )
    return replace(answer, candidates=tuple(limited))


def search_problems(
    problems: Sequence[Problem], find: Find, control: SearchControl, top: int | None = None
) -> FormatAnswer:
    """Return the best candidates of problems in several formats, without a search where the work bound rules one out.

    Each search gets an equal share of the budget that is left, except those that the heuristic's plans rule out: they come
    last, and get what the others leave. Raises the first problem's NoFeasiblePlan if no problem has a feasible plan.
    """
    answers: list[FormatAnswer] = []
    refusal: NoFeasiblePlan | None = None
    likely, unlikely = _by_heuristic(problems) if control.deadline_seconds is not None else (problems, [])
    for number, problem in enumerate((*likely, *unlikely)):
        if not all(_may_win(problem, answer) for answer in answers):
            continue
        part = control.part((len(likely) if number < len(likely) else len(problems)) - number)
        try:
            found = find(problem, part)
        except NoFeasiblePlan as refused:
            refusal = refusal or refused
            continue
        answers.append(FormatAnswer(problem, tuple(replace(one, dtype=_label(one, problem)) for one in found)))
    if refusal is not None and not answers:
        raise refusal
    best = min(answers, key=lambda answer: _value(answer.candidates[0], answer.problem))
    if best.problem.limits.objective is Objective.PARETO:
        merged = pareto_front(one for answer in answers for one in answer.candidates)
    else:
        merged = list(
            heapq.merge(*(answer.candidates for answer in answers), key=lambda one: _value(one, best.problem))
        )
    distinct = {one.plan: one for one in reversed(merged)}  # a plan of several formats counts in its best one
    kept = [one for one in merged if distinct[one.plan] is one]
    is_front = best.problem.limits.objective is Objective.PARETO
    answer = FormatAnswer(best.problem, tuple(subsampled(kept, top) if is_front else kept[:top]))
    return _with_unlimited(answer, [one for other in answers for one in other.candidates])


def _by_heuristic(problems: Sequence[Problem]) -> tuple[list[Problem], list[Problem]]:
    """Return the problems that may have the fastest plan, and those that the work bound and the heuristic's plans rule out."""
    quick: list[FormatAnswer] = []
    for problem in problems if len(problems) > 1 else ():
        with suppress(NoFeasiblePlan):
            candidate, told = megatron(problem, SearchControl(), 1)[0], problem.capabilities
            if told is None or is_expressible(candidate.plan, told):
                quick.append(FormatAnswer(problem, (candidate,)))
    likely = [one for one in problems if all(_may_win(one, answer) for answer in quick)]
    return likely, [one for one in problems if one not in likely]


def slow_format(
    problem: Problem, candidates: Sequence[Candidate], find: Find, control: SearchControl
) -> SlowFormat | None:
    """Return the price of the problem's format; None if all its accelerators compute it natively.

    The search for it ends with the control's budget, and leaves its events alone: they tell how the candidates were found.
    """
    dtype, names = problem.model.dtype, problem.accelerators
    emulated_on = emulating(names, dtype)
    if not emulated_on:
        return None
    native, best = best_format(names, problem.limits.dtypes), candidates[0]
    slow = SlowFormat(
        dtype, emulated_on, best.estimate.iteration_seconds, best.plan.global_batch_size, native, other=None
    )
    try:
        faster = in_format(problem, native)
        if not _may_win(faster, FormatAnswer(problem, tuple(candidates))):
            return slow
        other = find(faster, control.apart())[0]
    except ValueError:  # no data sheet, or no feasible plan
        return slow
    return replace(slow, other=other) if _value(other, problem) < _value(best, problem) else slow


def plan_in_own_format(problem: Problem, plan: Plan) -> FormatAnswer:
    """Return a plan in the format that a search would choose for it: the fastest native one of its devices, or float32.

    float32 is chosen where the plan fits into memory in that format alone.
    """
    used = problem.cluster.accelerators_of(plan.nodes)
    answers = []
    for dtype in dict.fromkeys((best_format(used, problem.limits.dtypes), Dtype.FLOAT32)):
        one = in_format(problem, dtype)
        answers.append(FormatAnswer(one, (replace(candidate_of(one, plan), dtype=dtype),)))
    return next((answer for answer in answers if answer.candidates[0].estimate.feasible), answers[0])


def slow_format_of(problem: Problem, plan: Plan) -> SlowFormat | None:
    """Return the price of the problem's format for a given plan; None if all devices of the plan compute it natively."""
    used = problem.with_nodes(plan.nodes)
    return slow_format(used, [candidate_of(used, plan)], lambda other, _: [candidate_of(other, plan)], SearchControl())


def _label(candidate: Candidate, problem: Problem) -> Dtype:
    """Return the preferred one of the formats that are as fast as the problem's on the plan's accelerators."""
    used = problem.cluster.accelerators_of(candidate.plan.nodes)
    return equally_fast(used, problem.model.dtype, problem.limits.dtypes)


def _value(candidate: Candidate, problem: Problem) -> float:
    """Return what the objective minimises, for one row."""
    if problem.limits.objective is Objective.COST and candidate.price_per_row is not None:
        return candidate.price_per_row
    return candidate.estimate.iteration_seconds / candidate.plan.global_batch_size


def _may_win(problem: Problem, answer: FormatAnswer) -> bool:
    """Return whether the work bound leaves room for a plan that is faster than the answer's best."""
    best = answer.candidates[0]
    if problem.limits.objective is not Objective.TIME or best.plan.global_batch_size != problem.global_batch_size:
        return True
    bound = work_bound_seconds(problem.cost_context, problem.nodes, problem.global_batch_size)
    return bound < best.estimate.iteration_seconds


def _is_memory_scarce(problem: Problem) -> bool:
    memory = min((one.memory_bytes for one in problem.cluster.accelerators), default=math.inf)
    return problem.model.parameters * FLOAT32_BYTES > memory * (1 - problem.limits.memory_headroom_ratio)
