"""Pipelines of several by the rows of their micro-batches, and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from trainwright.search.auto.bound.asks import Ask
from trainwright.search.auto.bound.needs import Tables
from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.quick import Quick
from trainwright.search.auto.bound.shares import Shares
from trainwright.search.auto.bound.sums import across_rates
from trainwright.search.auto.bound.whole import Whole

Devices = tuple[int, ...]
_MOST_HALVED = 64
"""Rows of a micro-batch; tables of more take long, and are rarely what matters."""


@dataclass(frozen=True)
class Answers:
    """What is known of one question, for each number of devices [devices …]: more devices and more time never hurt.

    Attributes:
        fails: most seconds that are known not to do.
        keeps: least seconds that are known to do.
    """

    fails: Array
    keeps: Array

    @classmethod
    def none(cls, shape: Devices) -> Answers:
        """Nothing is known."""
        size = tuple(one + 1 for one in shape)
        return cls(np.zeros(size), np.full(size, np.inf))

    def known(self, devices: Devices, seconds: float) -> bool | None:
        """Whether so many devices do in that time; None where that is not known."""
        if seconds <= self.fails[devices]:
            return False
        return True if seconds >= self.keeps[devices] else None

    def learn(self, devices: Devices, seconds: float, *, keeps: bool) -> None:
        """That they do, or do not."""
        if keeps:
            part = self.keeps[tuple(slice(one, None) for one in devices)]
            np.minimum(part, seconds, out=part)
        else:
            part = self.fails[tuple(slice(0, one + 1) for one in devices)]
            np.maximum(part, seconds, out=part)


class Lane:
    """Pipelines with `least_rows` … `rows` of some shares in a micro-batch; apart: with no node in common with others."""

    def __init__(self, shares: Shares, shape: Devices) -> None:
        self.shares, self.shape, self.rows = shares, shape, shares.rows
        self.quick = Quick(shares, shape)
        self._tables: dict[bool, Tables] = {}
        self._answers: dict[tuple[bool, Ask], Answers] = {}
        self._glances: dict[bool, tuple[float, Array]] = {}

    @cached_property
    def halves(self) -> tuple[Lane, ...]:
        """Those with the fewer, and with the more rows; none where there is but one number of them, or they are many."""
        least, most = self.shares.fewest_rows, self.rows
        if least == most or most > _MOST_HALVED:
            return ()
        middle = (least + most) // 2
        parts = ((least, middle), (middle + 1, most))
        return tuple(Lane(replace(self.shares, rows=b, least_rows=a, _weighted={}), self.shape) for a, b in parts)

    def glance(self, seconds: float, *, tight: bool = True) -> Array:
        """[devices …] the most rows that a pipeline passes in that time, or somewhat more; where `tight`, memory counts."""
        tight &= self.quick.tables.may_lack
        known, found = self._glances.get(tight, (0.0, np.empty(0)))
        if known != seconds:
            found = self.quick.rows(seconds, tight=tight)
            self._glances[tight] = seconds, found
        return found

    def is_known(self, seconds: float) -> bool:
        """Whether it has been looked at for that time, memory included."""
        return self._glances.get(self.quick.tables.may_lack, (0.0,))[0] == seconds

    def keeps(self, seconds: float, devices: Devices, ask: Ask, *, apart: bool) -> bool:
        """Whether a pipeline on no more than these devices may keep within the seconds."""
        answers = self._answers.setdefault((apart, ask), Answers.none(self.shape))
        known = answers.known(devices, seconds)
        if known is None:
            known = Whole(self._tables_where(apart=apart), devices).keeps(seconds, ask)
            answers.learn(devices, seconds, keeps=known)
        return known

    def _tables_where(self, *, apart: bool) -> Tables:
        if apart not in self._tables:
            across = across_rates(self.shares.terms, self.shares.counts)[apart]
            self._tables[apart] = Tables(self.shares, across=across)
        return self._tables[apart]
