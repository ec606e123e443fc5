"""Lower bounds of plans on whole devices, by class: those of one pipeline, and those of several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

import numpy as np

from trainwright.search.auto.bound.options import exact_options
from trainwright.search.auto.bound.pools import Pools, pools_of
from trainwright.search.auto.bound.several import Several, shared_rows
from trainwright.search.auto.bound.shares import Shares
from trainwright.search.auto.bound.terms import Terms
from trainwright.search.auto.bound.ways import Ways, stage_counts
from trainwright.search.auto.bound.whole import Ask, Whole
from trainwright.search.degrees import divisors
from trainwright.search.protocol import Problem

_PRECISION = 3e-3
_GROWTH = 1.4
_MOST_SPENT = 5e8
"""Stages of intervals looked at before a better bound is given up."""
_RATIO = 1.12
_EXACT_ROWS = 8


@dataclass
class Classes:
    """Of one problem."""

    problem: Problem
    spent: float = 0.0

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(reach.devices for reach in self._terms.options.reach)

    @cached_property
    def pools(self) -> Pools | None:
        """None where there are too many devices to look at."""
        return pools_of(self.problem)

    @cached_property
    def _terms(self) -> Terms:
        return Terms(self.problem, exact_options(self.problem, self.pools or []))

    @cached_property
    def _ways(self) -> Ways:
        return Ways.of(self._terms, self.problem.global_batch_size)

    def seconds(self, lowest: float, highest: float) -> float:
        """No plan takes less; the answer is sought between both, of which the first is known to be one: from below."""
        found = lowest
        while found < highest * (1 - _PRECISION) and self.spent < _MOST_SPENT:
            high = min(found * _GROWTH, highest)
            one = self.one(found, high)
            if one > found * (1 + _PRECISION):
                one = min(one, self.several(found, one))
            if one < high:
                return max(one, found)
            found = high
        return found

    def one(self, lowest: float, highest: float) -> float:
        """No plan with a single pipeline takes less; the answer is sought between both."""
        batch, counts = self.problem.global_batch_size, stage_counts(self.shape)
        found = highest
        for count in sorted(divisors(batch), key=lambda one: abs(np.log(one) - np.log(batch) / 2)):
            whole = Whole(Shares(self.problem, self._terms, self._ways, counts, batch // count), self.shape)
            for gathers in (False, True)[: 1 + (count > 1)]:
                ask = Ask(count, gathers)
                low, high = lowest, found
                if self._is_over(whole.spent) or found <= lowest * (1 + _PRECISION):
                    return lowest
                if not isfinite(whole.latency(high, ask)):
                    continue
                while high > low * (1 + _PRECISION) and not self._is_over(whole.spent):
                    middle = (low + high) / 2
                    low, high = (low, middle) if isfinite(whole.latency(middle, ask)) else (middle, high)
                found = low
            self.spent += whole.spent
        return max(found, lowest)

    def _is_over(self, more: float) -> bool:
        return self.spent + more > _MOST_SPENT

    def several(self, lowest: float, highest: float) -> float:
        """No plan with more than one pipeline takes less; the answer is sought between both."""
        batch, counts = self.problem.global_batch_size, stage_counts(self.shape)
        if batch == 1 or sum(self.shape) == 1:
            return highest
        if self.spent > _MOST_SPENT:
            return lowest
        lanes = [
            Several(Shares(self.problem, self._terms, self._ways, counts, most, least), self.shape)
            for least, most in _row_lanes(batch - 1)
        ]

        def possible(seconds: float) -> bool:
            for tight in (False, True):
                rows = np.max([lane.rows(seconds, tight=tight) for lane in lanes], axis=0)
                if shared_rows(rows) < batch:
                    return False
            return True

        low, high = lowest, highest
        found = highest
        if possible(high):
            while high > low * (1 + _PRECISION) and not self._is_over(sum(lane.whole.spent for lane in lanes)):
                middle = (low + high) / 2
                low, high = (low, middle) if possible(middle) else (middle, high)
            found = low
        self.spent += sum(lane.whole.spent for lane in lanes)
        return found


def _row_lanes(most: int) -> Iterator[tuple[int, int]]:
    """Gapless intervals of the rows 1 … most."""
    start = 1
    while start <= most:
        end = start if start <= _EXACT_ROWS else min(max(int(start * _RATIO), start), most)
        yield start, end
        start = end + 1
