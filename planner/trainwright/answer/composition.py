"""Composition of answers: the search in the best number format and batch size, then prices, baselines and node worth.

Command line, operator and library ask here, and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from trainwright.answer.answer import Answer, BatchSizes, NodeWorth, Stop
from trainwright.answer.baselines import heuristic_plans
from trainwright.answer.batch_size import best_batch_size
from trainwright.answer.formats import (
    Find,
    in_stated_format,
    plan_in_own_format,
    problems_in_formats,
    search_formats,
    search_problems,
    slow_format,
    slow_format_of,
    stating_format,
    without,
)
from trainwright.answer.node_worth import node_worths
from trainwright.answer.question import Question
from trainwright.plan import Plan
from trainwright.search import Candidate, Preference, Problem, SearchControl, run
from trainwright.search.candidates import candidate_of


def compose(question: Question, control: SearchControl | None = None) -> Answer:
    """Return the answer to a question. Raises NoFeasiblePlan if no plan fits, ValueError for an unknown planner."""
    control = control or SearchControl()
    kept = question.worth_share or 0.0
    first = control.part(1 / (1 - kept))
    answer = with_price(question, find_candidates(question, first), first)
    answer = with_baselines(question, answer)
    return replace(answer, node_worths=_node_worths(question, answer, control))


def find_candidates(question: Question, control: SearchControl) -> Answer:
    """Return the planner's candidates alone, in the best number format and batch size where they are not given."""
    tried: list[BatchSizes] = []
    started, find = time.perf_counter(), _finder(question, tried)
    if question.chooses_format:
        answer = search_formats(question.problems, find, control, question.top)
    else:
        (problem,) = question.problems
        answer = Answer(problem, tuple(find(problem, control)))
    return replace(
        answer,
        candidates=tuple(stating_format(candidate, answer.problem) for candidate in answer.candidates),
        batch_sizes=tuple(tried),
        search_seconds=time.perf_counter() - started,
        stopped=stop_of(control),
    )


def with_price(question: Question, answer: Answer, control: SearchControl) -> Answer:
    """Return the answer with the price of its number format, if that was given and is slow."""
    if question.chooses_format:
        return answer
    tried: list[BatchSizes] = []
    find = _finder(replace(question, top=1), tried)
    slow = slow_format(answer.problem, answer.candidates, find, control)
    return replace(answer, slow=slow, batch_sizes=(*answer.batch_sizes, *tried))


def with_baselines(question: Question, answer: Answer) -> Answer:
    """Return the answer with as many of the heuristic's plans as are asked for."""
    if not question.baselines:
        return answer
    others = (problem for problem in _problems(question) if problem.model.dtype is not answer.problem.model.dtype)
    return replace(answer, baselines=heuristic_plans((answer.problem, *others), question.baselines))


def answer_of_plan(problem: Problem, plan: Plan) -> Answer:
    """Return a given plan with its estimate, in the number format that it states.

    A plan without one is in the problem's, or if that is open, in the one that a search would choose for it. Raises ValueError for
    a plan in another format than the problem's.
    """
    if problem.chooses_format and plan.dtype is None:
        return plan_in_own_format(problem, plan)
    problem = in_stated_format(problem, [plan])
    candidate = stating_format(candidate_of(problem, plan), problem)
    return Answer(problem, (candidate,), slow_format_of(problem, plan))


def stop_of(control: SearchControl) -> Stop | None:
    """Return what ended a search before its end; None if nothing did."""
    if not control.budget_exhausted.is_set():
        return None
    return Stop.INTERRUPTION if control.interrupted.is_set() else Stop.BUDGET


def _finder(question: Question, tried: list[BatchSizes]) -> Find:
    """Return the question's search of one problem, which adds the batch sizes that it tried."""

    def find(problem: Problem, control: SearchControl, top: int | None = question.top) -> list[Candidate]:
        return run(question.planner, problem, top=top, control=control)

    def find_with_batch(problem: Problem, control: SearchControl) -> list[Candidate]:
        candidates, sizes = best_batch_size(problem, find, control, question.top)
        tried.append(sizes)
        return candidates

    return find_with_batch if question.searches_batch else find


def _problems(question: Question) -> Sequence[Problem]:
    """Return the problem in all number formats that were searched."""
    (first, *others) = question.problems
    if others or not first.chooses_format or first.profiles.origin == "measured":
        return question.problems
    return problems_in_formats(first)


def _node_worths(question: Question, answer: Answer, control: SearchControl) -> tuple[NodeWorth, ...]:
    """Search without each accelerator in what is left of the budget; both answers' first plans are preferred alike."""
    if question.worth_share is None or control.expired():
        return ()
    problems, find = question.problems, _finder(replace(question, top=1), [])

    def find_without(name: str, part: SearchControl) -> float:
        left = [
            without(replace(problem, preference=Preference(problem.preference.tolerance)), [name])
            for problem in problems
            if {*problem.accelerators} - {name}
        ]
        remaining = (
            search_formats(left, find, part, 1) if question.chooses_format else search_problems(left, find, part, 1)
        )
        return remaining.best.estimate.iteration_seconds

    widest = max(problems, key=lambda problem: len(problem.accelerators))
    used = widest.cluster.accelerators_of(answer.best.plan.nodes)
    return tuple(node_worths(widest, answer.best.estimate.iteration_seconds, used, find_without, control))
