"""What no plan can beat: a lower bound of the iteration over all plans of a problem."""

from __future__ import annotations

from trainwright.search.auto.bound.classes import MOST_SPENT, Classes
from trainwright.search.auto.bound.fluid import Fluid
from trainwright.search.auto.bound.priced import Priced
from trainwright.search.protocol import Problem

_MARGIN = 1e-9
"""For rounding."""
_FARTHEST = 8
"""How many times the work alone a bound is looked for."""


def lower_bound_seconds(problem: Problem, *, incumbent_seconds: float | None = None, effort: float = 1.0) -> float:
    """No plan of the problem takes less, whatever its pipelines, stages, degrees, rows, sharding and recompute.

    Where an incumbent is given, the bound is looked for below its seconds only: it is at most that. With more effort, in
    about as much more time, it may be closer. Where devices are too many to be told apart, they have prices.
    """
    fluid = Fluid.of(problem)
    constant = problem.runtime.constant_seconds
    highest = _FARTHEST * fluid.work_seconds if incumbent_seconds is None else max(incumbent_seconds - constant, 0.0)
    found = fluid.seconds(highest)
    priced, classes = Priced(problem, fluid, effort), Classes(problem, MOST_SPENT * effort)
    one = priced.one(found, highest)
    if classes.pools is None:
        return (priced.several(found, one) + constant) * (1 - _MARGIN)
    one = classes.one(one, highest)
    return (priced.several(classes.several(found, one), one) + constant) * (1 - _MARGIN)
