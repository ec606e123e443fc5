"""Lower bounds of plans on whole devices, by class: those of one pipeline, and those of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainwright.plan import Schedule
from trainwright.search.auto.bound.asks import Ask
from trainwright.search.auto.bound.copies import may_be_several
from trainwright.search.auto.bound.ledger import Ledger
from trainwright.search.auto.bound.needs import Tables
from trainwright.search.auto.bound.options import exact_options
from trainwright.search.auto.bound.parts import intervals
from trainwright.search.auto.bound.pools import Pools, pools_of
from trainwright.search.auto.bound.several import Several
from trainwright.search.auto.bound.shares import Shares
from trainwright.search.auto.bound.sought import sought
from trainwright.search.auto.bound.terms import Terms
from trainwright.search.auto.bound.ways import Ways, stage_counts
from trainwright.search.auto.bound.whole import Whole
from trainwright.search.degrees import divisors
from trainwright.search.protocol import Problem

_PRECISION = 3e-3
MOST_SPENT = 1e9
"""Numbers looked at before no further bound of a class is tried: a few seconds."""
_FARTHEST = 3
"""Times as much before one that is tried is given up."""
_GLANCED = 1e-2
"""How close a bound at a glance is looked for, from which on it is looked for closely."""
_GLANCES = 1.0
"""Where that takes more than such a part of what may be spent, closely takes too long."""
_RATIO = 1.12
_EXACT_ROWS = 8


@dataclass
class Classes:
    """Of one problem: each class is looked at until so much is spent."""

    problem: Problem
    most_spent: float = MOST_SPENT

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Devices by pool."""
        return tuple(reach.devices for reach in self._terms.options.reach)

    @cached_property
    def pools(self) -> Pools | None:
        """None where there are too many devices to look at."""
        return pools_of(self.problem)

    def one(self, lowest: float, highest: float) -> float:
        """No plan with a single pipeline takes less; the answer is sought between both, of which the first is known to be one."""
        self.ledger.spent = 0
        return self._sought(lowest, highest, self._keeps_alone)

    def several(self, lowest: float, highest: float) -> float:
        """The same of plans with more than one."""
        if not may_be_several(self.problem):
            return highest
        self.ledger.spent = 0
        glanced = self._sought(lowest, highest, self._several.possible_at_a_glance, _GLANCED)
        if self.ledger.spent > _GLANCES * self.most_spent:
            return glanced
        return self._sought(glanced, highest, self._several.possible)

    def _sought(
        self, lowest: float, highest: float, keeps: Callable[[float], bool], precision: float = _PRECISION
    ) -> float:
        return sought(keeps, (lowest, highest), self.ledger, self.most_spent, precision)

    def _keeps_alone(self, seconds: float) -> bool:
        """Whether one pipeline may keep within the seconds."""
        for ask in sorted(self._asks, key=lambda one: self._asks[one]):
            if self._asks[ask] < seconds:
                keeps = self._alone[ask.micro_batches].keeps(seconds, ask)
                # What keeps is asked first from now on.
                self._asks[ask] = -seconds if keeps else seconds
                if keeps:
                    return True
        return False

    @cached_property
    def _asks(self) -> dict[Ask, float]:
        """What may be asked of one pipeline, the likeliest first, and the most seconds that it is known not to keep within.

        Where it kept within some, these with a minus: then it is asked first.
        """
        middle = np.log(self.problem.global_batch_size) / 2
        counts = sorted(divisors(self.problem.global_batch_size), key=lambda one: abs(np.log(one) - middle))
        return {
            Ask(count, schedule): 0.0
            for count in counts
            for schedule in Schedule
            if count > 1 or schedule is not Schedule.GPIPE
        }

    @cached_property
    def _alone(self) -> dict[int, Whole]:
        """By number of micro-batches."""
        batch = self.problem.global_batch_size
        return {count: Whole(Tables(self._shares(batch // count)), self.shape) for count in divisors(batch)}

    @cached_property
    def _several(self) -> Several:
        lanes = intervals(max(self.problem.global_batch_size - 1, 1), _RATIO, _EXACT_ROWS)
        return Several([self._shares(most, least) for least, most in lanes], self.shape)

    def _shares(self, rows: int, least_rows: int = 0) -> Shares:
        return Shares(self.problem, self._terms, self._ways, stage_counts(self.shape), rows, least_rows, self.ledger)

    @cached_property
    def ledger(self) -> Ledger:
        """What is spent and kept."""
        return Ledger(_FARTHEST * self.most_spent)

    @cached_property
    def _terms(self) -> Terms:
        return Terms(self.problem, exact_options(self.problem, self.pools or []))

    @cached_property
    def _ways(self) -> Ways:
        return Ways.of(self._terms, self.problem.global_batch_size)
