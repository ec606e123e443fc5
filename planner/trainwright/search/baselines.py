"""Baselines that a person would use: Megatron's heuristic on all devices, and on the best part of equal ones."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

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
    whole = _heuristic(problem)
    if len(problem.accelerators) == 1:
        return Baselines(whole)
    parts = {name: _heuristic(on_one_accelerator(problem, name)) for name in problem.accelerators}
    found = {name: one for name, one in parts.items() if one is not None}
    if not found:
        return Baselines(whole)
    fastest = min(found, key=lambda name: found[name].estimate.iteration_seconds)
    return Baselines(whole, found[fastest], fastest)


def on_one_accelerator(problem: Problem, accelerator: str) -> Problem:
    """Return the problem on the nodes of one accelerator alone."""
    cluster = problem.cluster
    return problem.with_nodes([name for name in problem.nodes if cluster.node(name).accelerator == accelerator])


def _heuristic(problem: Problem) -> Candidate | None:
    with suppress(NoFeasiblePlan):
        return megatron(problem, SearchControl(), 1)[0]
    return None
