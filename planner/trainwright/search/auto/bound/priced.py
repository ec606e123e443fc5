"""Lower bounds of plans whose devices have prices and whose stages are whole: for more devices than are told apart."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from trainwright.search.auto.bound.asks import Ask
from trainwright.search.auto.bound.chains import Chains, Loose, Picks
from trainwright.search.auto.bound.copies import copy_bytes, may_be_several, usable_bytes
from trainwright.search.auto.bound.far import Far, cells
from trainwright.search.auto.bound.fluid import Fluid
from trainwright.search.auto.bound.ledger import Ledger, SpentError
from trainwright.search.auto.bound.needs import Tables
from trainwright.search.auto.bound.options import Array, exact_options
from trainwright.search.auto.bound.parts import Part, parts_of_one, parts_of_several
from trainwright.search.auto.bound.pools import by_accelerator
from trainwright.search.auto.bound.shares import Shares
from trainwright.search.auto.bound.sought import sought
from trainwright.search.auto.bound.stages import Stages
from trainwright.search.auto.bound.sums import across_rates
from trainwright.search.auto.bound.terms import Terms
from trainwright.search.auto.bound.ways import Counts, Ways
from trainwright.search.protocol import Problem

_PRECISION = 5e-3
_MOST_SPENT = 7e8
"""Numbers looked at before the answer is sought no closer: two seconds or so."""
_FARTHEST = 4
"""Times as much before it is given up."""
_MOST_NEAR = 48
"""Stages of devices of one accelerator that are looked at exactly; more only where a node has more."""
_ROUNDING = 1e-9
_FIRST_STEP = 1.12


@dataclass
class Priced:
    """Of one problem.

    All devices together have the price K. Of the pipelines one passes B_p rows on devices whose price is no more than
    K B_p / B: as long as all chains of stages that pass so many rows in T are dearer, no plan takes T. A stage of few devices
    of one accelerator is looked at as in `Whole`, any other as in `Far`: no node holds all of it.
    """

    problem: Problem
    fluid: Fluid
    effort: float = 1.0
    _stages: dict[tuple[tuple[int, int], int, bool], Stages] = field(default_factory=dict)
    _fails: dict[Part, float] = field(default_factory=dict)
    _kept: list[Part] = field(default_factory=list)

    def one(self, lowest: float, highest: float) -> float:
        """No plan with a single pipeline takes less; the answer is sought between both, of which the first is known to be one."""
        return self._sought(lowest, highest, list(parts_of_one(self.problem.global_batch_size)))

    def several(self, lowest: float, highest: float) -> float:
        """The same of plans with more than one."""
        if not may_be_several(self.problem):
            return highest
        return self._sought(lowest, highest, list(parts_of_several(self.problem.global_batch_size)))

    def _sought(self, lowest: float, highest: float, parts: list[Part]) -> float:
        """In growing steps from the lowest on, which take the shorter the less time there is; then by halving."""
        if self.fluid.work_seconds <= 0:
            return lowest
        self.ledger.spent = 0
        self._fails, self._kept = {}, []
        low, step, nearly = lowest, _FIRST_STEP, highest / (1 + _PRECISION)
        with suppress(SpentError):
            while low < nearly:
                tried = min(max(low, _PRECISION * nearly) * step, nearly)
                if self._keeps(tried, parts):
                    most = max(_MOST_SPENT * self.effort - self.ledger.spent, 0.0)
                    return sought(
                        lambda seconds: self._keeps(seconds, parts), (low, tried), self.ledger, most, _PRECISION
                    )
                low, step = tried, step * _FIRST_STEP
        return low

    def _keeps(self, seconds: float, parts: list[Part]) -> bool:
        """Whether a pipeline of one of the parts may keep within the seconds and its share of the price."""
        # What kept within more seconds is asked first: mostly it keeps again.
        waiting = parts + self._kept
        while waiting:
            part = waiting.pop()
            if seconds <= self._fails.get(part, 0.0):
                continue
            if not self._part_keeps(part, seconds):
                self._fails[part] = seconds
            elif halves := part.halves():
                waiting += halves
            else:
                self._kept = [part]
                return True
        return False

    def _part_keeps(self, part: Part, seconds: float) -> bool:
        share = min(part.most / self.problem.global_batch_size, 1.0)
        budget = self._whole_price * share * (1 + _ROUNDING)
        if budget < self._least_price:
            return False
        # Of stages in the budget, or in somewhat more, so that others with as many rows can use them.
        stages = self._stages_of(part.rows, math.floor(-math.log2(share)), several=part.of_several)
        limits, ask = (seconds, budget), Ask(part.micro_batches[0], None)
        # Most of what does not keep is known soon; the rest is looked at closely where it is not to be halved.
        kinds = [(Loose, False), (Chains, False), (Chains, True)]
        kinds = kinds[:1] if part.halves() else kinds[: 2 + stages.near.may_lack]
        return all(self._stages_keep(kind, stages, ask, limits, tight=tight) for kind, tight in kinds)

    def _stages_keep(
        self, kind: type[Chains], stages: Stages, ask: Ask, limits: tuple[float, float], *, tight: bool
    ) -> bool:
        """Whether a pipeline of these stages may."""
        if stages.one_keeps(ask, *limits, tight=tight):
            return True
        known: dict[tuple[int, int], Picks] = {}

        def picks(behind: int) -> Picks:
            key = ask.spared(behind), ask.kept(behind) if tight else 0
            if key not in known:
                known[key] = stages.picks(ask, behind, limits, tight=tight)
            return known[key]

        most = stages.near.most_stages
        return most > 1 and kind(self._terms, picks, *limits, most, self.ledger.spend).keeps()

    def _stages_of(self, rows: tuple[int, int], halvings: int, *, several: bool) -> Stages:
        key = rows, halvings, several
        if key not in self._stages:
            prices = self._counts @ self._prices
            counts = self._counts[prices <= self._whole_price / 2**halvings * (1 + 2 * _ROUNDING)]
            shares = Shares(self.problem, self._terms, self._ways, counts, rows[1], rows[0], self.ledger)
            across = across_rates(self._terms, counts)[0] if several else None
            far = Far(self.fluid, shares, *self._cells)
            self._stages[key] = Stages(Tables(shares, across=across), counts @ self._prices, far, several)
        return self._stages[key]

    @cached_property
    def ledger(self) -> Ledger:
        """What is spent and kept."""
        return Ledger(_FARTHEST * _MOST_SPENT * self.effort)

    @cached_property
    def _prices(self) -> Array:
        """[accelerator] of a device."""
        names = self.fluid.options.accelerators
        return np.array([self.fluid.prices[names.index(name)] for name in self._terms.options.accelerators])

    @cached_property
    def _devices(self) -> Counts:
        """[accelerator] there are."""
        return np.array([reach.devices for reach in self._terms.options.reach], dtype=np.intp)

    @cached_property
    def _least_price(self) -> float:
        """Of a pipeline: of its devices there is one at least, and they have the memory for the whole model."""
        most_bytes = float((usable_bytes(self.problem, self._terms.options.accelerators) / self._prices).max())
        return max(float(self._prices.min()), copy_bytes(self.problem) / most_bytes)

    @cached_property
    def _whole_price(self) -> float:
        """K."""
        return float(self._prices @ self._devices)

    @cached_property
    def _most_near(self) -> Counts:
        """[accelerator] devices of a stage that is looked at exactly: all that fit in a node, at least."""
        found = np.array([reach.group for reach in self._terms.options.reach], dtype=np.intp)
        while found.sum() < _MOST_NEAR and (found < self._devices).any():
            found[np.where(found < self._devices, found, np.iinfo(np.intp).max).argmin()] += 1
        return found

    @cached_property
    def _counts(self) -> Counts:
        """[stage, accelerator] devices."""
        each = np.eye(len(self._most_near), dtype=np.intp)
        return np.concatenate([np.outer(np.arange(1, most + 1), each[a]) for a, most in enumerate(self._most_near)])

    @cached_property
    def _cells(self) -> tuple[Array, Array]:
        """[cell] prices of all other stages: they have devices of two accelerators, or more of one."""
        cheapest = np.sort(self._prices)
        least = [float(cheapest[:2].sum())] if len(cheapest) > 1 else []
        least += (self._prices * (self._most_near + 1))[self._most_near < self._devices].tolist()
        return cells(min(least, default=math.inf), self._whole_price)

    @cached_property
    def _terms(self) -> Terms:
        return Terms(self.problem, exact_options(self.problem, by_accelerator(self.problem)))

    @cached_property
    def _ways(self) -> Ways:
        return Ways.of(self._terms, self.problem.global_batch_size)
