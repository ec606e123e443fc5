"""Whether several pipelines can share the batch within some seconds, each on whole devices of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from trainwright.search.auto.bound.asks import Ask
from trainwright.search.auto.bound.needs import Tables
from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.quick import Quick
from trainwright.search.auto.bound.shares import Shares
from trainwright.search.auto.bound.sums import across_rates
from trainwright.search.auto.bound.whole import Whole

Devices = tuple[int, ...]


@dataclass
class Several:
    """Pipelines with `least_rows` … `rows` of some `Shares` in a micro-batch, one or the other.

    How many rows a pipeline passes is known at a glance (`Quick`), and closely where it matters: of the devices that the
    best division among pipelines gives to each of them, until the best division is known closely.
    """

    lanes: Sequence[Shares]
    shape: Devices
    _tables: dict[tuple[int, bool], Tables] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._quick = [Quick(shares, self.shape) for shares in self.lanes]

    @property
    def spent(self) -> int:
        """A count of what was looked at."""
        return sum(one.tables.spent for one in self._quick) + sum(one.spent for one in self._tables.values())

    def possible(self, seconds: float, is_over: Callable[[], bool]) -> bool:
        """Whether they may pass the whole batch in that time; where it is over, whether they may at a glance."""
        batch = self.lanes[0].problem.global_batch_size
        for tight in (False, True):
            glances = [lane.rows(seconds, tight=tight) for lane in self._quick]
            rows = np.max(glances, axis=0)
            if divided(rows)[0] < batch:
                return False
        known: set[Devices] = set()
        while not is_over():
            most, parts = divided(rows)
            if most < batch:
                return False
            unknown = set(parts) - known
            if not unknown:
                return True
            for devices in unknown:
                known.add(devices)
                found = self._rows(seconds, devices, [float(one[devices]) for one in glances])
                fewer = tuple(slice(0, one + 1) for one in devices)
                rows[fewer] = np.minimum(rows[fewer], found)
        return True

    def _rows(self, seconds: float, devices: Devices, glances: Sequence[float]) -> float:
        """The most rows of a pipeline on no more than these devices; `glances` are those of every lane."""
        most = 0.0
        for number in sorted(range(len(glances)), key=lambda lane: -glances[lane]):
            if glances[number] <= most:
                break
            rows = self.lanes[number].rows
            for gathers in (False, True):
                least, high = int(most // rows), int(glances[number] // rows)
                while least < high:
                    middle = (least + high + 1) // 2
                    if self._keeps(seconds, devices, number, Ask(middle, gathers)):
                        least = middle
                    else:
                        high = middle - 1
                most = max(most, float(least * rows))
        return most

    def _keeps(self, seconds: float, devices: Devices, lane: int, ask: Ask) -> bool:
        apart = bool(self._quick[lane].closed[devices])
        if (lane, apart) not in self._tables:
            shares = self.lanes[lane]
            self._tables[lane, apart] = Tables(shares, across=across_rates(shares.terms, shares.counts)[apart])
        return Whole(self._tables[lane, apart], devices).keeps(seconds, ask)


def divided(rows: Array) -> tuple[float, tuple[Devices, ...]]:
    """The most rows of two or more pipelines that divide all devices, and which, by the most of one [devices …]."""
    best = rows.copy()
    parts: dict[Devices, tuple[Devices, ...]] = {}
    several = 0.0
    found: tuple[Devices, ...] = ()
    for at in sorted(np.ndindex(*rows.shape), key=sum):
        parts[at] = (at,)
        if sum(at) < 2:
            continue
        whole = best[tuple(slice(0, one + 1) for one in at)]
        pairs = whole + whole[tuple(slice(None, None, -1) for _ in at)]
        pairs[(0,) * len(at)] = pairs[tuple(-1 for _ in at)] = 0.0
        first = np.unravel_index(int(pairs.argmax()), pairs.shape)
        several = float(pairs[first])
        one: Devices = tuple(int(part) for part in first)
        other: Devices = tuple(a - b for a, b in zip(at, one, strict=True))
        found = tuple(part for part in (*parts[one], *parts[other]) if best[part] > 0) if several > 0 else ()
        if several > best[at]:
            best[at], parts[at] = several, found
    return several, found
