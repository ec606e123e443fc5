"""Baselines that a person would use: Megatron's heuristic on all devices, and on the best part of equal ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from trainwright.search.format_search import Find, FormatAnswer, search_problems
from trainwright.search.megatron import megatron
from trainwright.search.problem import Candidate, NoFeasiblePlan, Problem, SearchControl


@dataclass(frozen=True, slots=True)
class Baselines:
    """Best plans of the heuristic; None where none fits.

    Attributes:
        of_all: on all devices.
        of_equal: on the devices of the accelerator on which it is fastest.
        accelerator: that accelerator; None if there is but one.
    """

    of_all: Candidate | None
    of_equal: Candidate | None = None
    accelerator: str | None = None

    @property
    def better(self) -> Candidate | None:
        """Return the faster one."""
        found = [one for one in (self.of_all, self.of_equal) if one is not None]
        return min(found, key=lambda one: one.estimate.iteration_seconds, default=None)


def baselines(problem: Problem) -> Baselines:
    """Return the heuristic's plans on all devices of the problem and on each accelerator's."""
    control = SearchControl()
    whole: Candidate | None = None
    with suppress(NoFeasiblePlan):
        whole = _heuristic(problem, control)[0]
    fastest = best_on_one_accelerator([problem], _heuristic, control)
    if fastest is None:
        return Baselines(whole)
    return Baselines(whole, fastest.candidates[0], *fastest.problem.accelerators)


def best_on_one_accelerator(problems: Sequence[Problem], find: Find, control: SearchControl) -> FormatAnswer | None:
    """Return the best plan on the nodes of one accelerator, with the problem on them.

    `problems` are one problem in several number formats. None if no plan fits, and if there is but one accelerator.
    """
    parts = [on_one_accelerator(one, name) for one in problems for name in one.accelerators]
    with suppress(NoFeasiblePlan):
        if len({one.accelerators for one in parts}) > 1:
            return search_problems(parts, find, control, 1)
    return None


def on_one_accelerator(problem: Problem, accelerator: str) -> Problem:
    """Return the problem on the nodes of one accelerator alone."""
    cluster = problem.cluster
    return problem.with_nodes([name for name in problem.nodes if cluster.node(name).accelerator == accelerator])


def _heuristic(problem: Problem, control: SearchControl) -> list[Candidate]:
    return megatron(problem, control, 1)
