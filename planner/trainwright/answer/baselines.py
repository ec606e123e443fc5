"""Baselines of an answer: Megatron's heuristic on all devices, and on the best part of equal ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace

from trainwright.answer.answer import Answer, Baselines
from trainwright.answer.formats import Find, objective_value, search_problems
from trainwright.answer.question import HEURISTIC
from trainwright.exports import Capabilities, is_expressible
from trainwright.search import Candidate, NoFeasiblePlan, Preference, Problem, SearchControl, run
from trainwright.search.candidates import DeviceSymmetry


def heuristic_plans(problems: Sequence[Problem], count: int) -> Baselines:
    """Return the heuristic's plans on all devices and on each accelerator's, and `count` of them to try.

    `problems` are one problem in several number formats: the plans on all devices are in the first one, that on equal devices
    is in the one that is best there. Preferences do not apply to them. With a limit to one trainer, those to try are the ones
    that it can run or, if it can run none, the nearest ones that it can.
    """
    free = [_of_any_trainer(one) for one in problems]
    of_all, equal = _on_all(free[0], count), _on_equal(free, count)
    plans = _to_try(of_all, equal, problems[0], count)
    if not plans and (of_all or equal is not None):
        limited = [replace(one, preference=Preference()) for one in problems]
        plans = _to_try(_on_all(limited[0], count), _on_equal(limited, count), problems[0], count)

    def labelled(candidate: Candidate) -> Candidate:
        return candidate if problems[0].chooses_format else replace(candidate, dtype=None)

    return Baselines(
        labelled(of_all[0]) if of_all else None,
        None if equal is None else labelled(equal.best),
        None if equal is None else equal.problem.accelerators[0],
        tuple(map(labelled, plans)),
    )


def _of_any_trainer(problem: Problem) -> Problem:
    """Return the problem of every plan in the number formats of its trainer, without a preference."""
    trainer = problem.limits.expressible_by
    every = None if trainer is None else Capabilities(every_plan=True, dtypes=trainer.dtypes)
    return replace(problem, limits=replace(problem.limits, expressible_by=every), preference=Preference())


def _on_all(problem: Problem, count: int) -> tuple[Candidate, ...]:
    with suppress(NoFeasiblePlan):
        return search_problems([problem], _find(count), SearchControl(), count).candidates
    return ()


def _on_equal(problems: Sequence[Problem], count: int) -> Answer | None:
    """Return the best plan on the nodes of one accelerator; None if no plan fits, and if there is but one accelerator."""
    parts = [one.on_accelerator(name) for one in problems for name in one.accelerators]
    with suppress(NoFeasiblePlan):
        if len({one.accelerators for one in parts}) > 1:
            return search_problems(parts, _find(count), SearchControl(), 1)
    return None


def _find(count: int) -> Find:
    return lambda problem, control: run(HEURISTIC, problem, top=count, control=control)


def _to_try(of_all: Sequence[Candidate], equal: Answer | None, problem: Problem, count: int) -> list[Candidate]:
    """Return distinct plans that the problem's trainer can run, best first; a single one is the better one of the first two."""
    capabilities = problem.capabilities
    symmetry = DeviceSymmetry(problem.cluster)
    distinct: dict[Hashable, Candidate] = {}
    for one in (*of_all[:1], *(equal.candidates if equal is not None else ()), *of_all[1:]):
        if capabilities is None or is_expressible(one.plan, capabilities):
            distinct.setdefault(symmetry.canonical_key(one.plan), one)
    objective = problem.limits.objective
    return sorted([*distinct.values()][: max(count, 2)], key=lambda one: objective_value(one, objective))[:count]
