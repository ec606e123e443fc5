"""Baselines of an answer: Megatron's heuristic on all devices, and on the best part of equal ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace

from trainwright.answer.answer import Answer, Baselines
from trainwright.answer.formats import objective_value, search_problems, stating_format
from trainwright.answer.question import HEURISTIC
from trainwright.exports import Capabilities, is_expressible
from trainwright.search import Candidate, NoFeasiblePlan, Preference, Problem, SearchControl, run
from trainwright.search.candidates import DeviceSymmetry, candidate_of, drop_equivalent
from trainwright.search.preference.error_band_order import TOLERANCE


def heuristic_plans(problems: Sequence[Problem], count: int) -> Baselines:
    """Return the heuristic's plans on all devices and on each accelerator's, and `count` of them to try.

    `problems` are one problem in several number formats: the plans on all devices are in the first one, that on equal devices
    is in the one that is best there. Preferences do not apply to them. With a limit to one trainer they are the heuristic's
    plans that it supports, since nobody could run the others; if it supports none, those to try are the nearest ones.
    """
    first = problems[0]
    of_all, equal = _heuristic([_of_any_trainer(problem) for problem in problems], count, first.capabilities)
    plans = _to_try(of_all, equal, first, count)
    if not plans and first.capabilities is not None:
        near = _heuristic([replace(problem, preference=Preference()) for problem in problems], count)
        plans = _to_try(*near, first, count)

    def labelled(candidate: Candidate) -> Candidate:
        # A format by name stays, whichever other one is as fast.
        return stating_format(candidate if first.chooses_format else candidate_of(first, candidate.plan), first)

    return Baselines(
        labelled(of_all[0]) if of_all else None,
        None if equal is None else labelled(equal.best),
        None if equal is None else equal.problem.accelerators[0],
        tuple(map(labelled, plans)),
    )


def _of_any_trainer(problem: Problem) -> Problem:
    """Return the problem of every plan in the number formats of its trainer, without a preference."""
    trainer = problem.limits.expressible_by
    any_plan = None if trainer is None else Capabilities(every_plan=True, dtypes=trainer.dtypes)
    return replace(problem, limits=replace(problem.limits, expressible_by=any_plan), preference=Preference())


def _heuristic(
    problems: Sequence[Problem], count: int, capabilities: Capabilities | None = None
) -> tuple[tuple[Candidate, ...], Answer | None]:
    """Return the best plans on all devices, and the best one on the nodes of one accelerator; with `capabilities` supported ones.

    There are none where no plan fits, and none on one accelerator if there is but one.
    """

    def find(problem: Problem, control: SearchControl) -> list[Candidate]:
        if capabilities is None:
            return run(HEURISTIC, problem, top=count, control=control)
        candidates = run(HEURISTIC, problem, top=None, control=control)
        supported = [candidate for candidate in candidates if is_expressible(candidate.plan, capabilities)]
        if not supported:
            raise NoFeasiblePlan("the trainer supports no plan of the heuristic")
        return drop_equivalent(supported, TOLERANCE)[:count]

    of_all, equal = tuple[Candidate, ...](), None
    with suppress(NoFeasiblePlan):
        of_all = search_problems(problems[:1], find, SearchControl(), count).candidates
    parts = [problem.on_accelerator(name) for problem in problems for name in problem.accelerators]
    with suppress(NoFeasiblePlan):
        if len({part.accelerators for part in parts}) > 1:
            equal = search_problems(parts, find, SearchControl(), 1)
    return of_all, equal


def _to_try(of_all: Sequence[Candidate], equal: Answer | None, problem: Problem, count: int) -> list[Candidate]:
    """Return distinct plans, best first; a single one is the better one of the first two."""
    symmetry = DeviceSymmetry(problem.cluster)
    distinct: dict[Hashable, Candidate] = {}
    for candidate in (*of_all[:1], *(equal.candidates if equal is not None else ()), *of_all[1:]):
        distinct.setdefault(symmetry.canonical_key(candidate.plan), candidate)
    objective = problem.limits.objective
    return sorted([*distinct.values()][: max(count, 2)], key=lambda plan: objective_value(plan, objective))[:count]
