"""Whether several pipelines can share the batch within some seconds, each on whole devices of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np
from numpy.typing import NDArray

from trainwright.plan import Schedule
from trainwright.search.auto.bound.asks import Ask
from trainwright.search.auto.bound.lanes import Devices, Lane
from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.shares import Shares


class Several:
    """Pipelines with `least_rows` … `rows` of some `Shares` in a micro-batch, one or the other.

    How many rows a pipeline passes is known at a glance (`Quick`), and closely where it matters: of all devices together, and
    of those that the best division among pipelines gives to each of them, until the best division is known closely.
    """

    def __init__(self, lanes: Sequence[Shares], shape: Devices) -> None:
        self.lanes, self.shape = [Lane(shares, shape) for shares in lanes], shape
        self.batch = lanes[0].problem.global_batch_size

    def possible_at_a_glance(self, seconds: float) -> bool:
        """Whether they may pass the whole batch in that time, by what is known of each of them at a glance."""
        return any(divided(rows)[0] >= self.batch for rows in self._glances(seconds))

    def _glances(self, seconds: float) -> Iterator[NDArray[np.float64]]:
        """[devices …] the most rows of a pipeline, of more and more lanes; none where they do not do even with ample memory."""
        free = [lane.glance(seconds, tight=False) for lane in self.lanes]
        rows = np.zeros_like(free[0])
        if divided(np.max(free, axis=0))[0] >= self.batch:
            for number in sorted(range(len(free)), key=lambda one: -float(free[one].sum())):
                if (free[number] > rows).any():
                    rows = np.maximum(rows, self.lanes[number].glance(seconds))
                    yield rows

    def possible(self, seconds: float) -> bool:
        """The same, with what is known of each of them closely where that matters."""
        rows = [np.zeros(1), *self._glances(seconds)][-1]
        if divided(rows)[0] < self.batch:
            return False
        # No pipeline of several has all devices, but none passes more than one that had would.
        np.minimum(rows, self._rows(seconds, self.shape, apart=False), out=rows)
        known: dict[Devices, float] = {}
        while True:
            most, parts = divided(rows)
            if most < self.batch:
                return False
            unknown = set(parts) - set(known)
            if not unknown:
                return True
            for devices in unknown:
                apart, within = bool(self._closed[devices]), tuple(slice(0, one + 1) for one in devices)
                fewer = (one for one in known if self._closed[one] == apart and np.less_equal(one, devices).all())
                least = max((known[one] for one in fewer), default=0.0)
                found = known[devices] = self._rows(seconds, devices, apart=apart, least=least)
                # Of nodes of its own a pipeline has slower sums than one with fewer devices that shares its nodes.
                alike = self._closed[within] if apart else np.True_
                rows[within] = np.where(alike, np.minimum(rows[within], found), rows[within])

    @property
    def _closed(self) -> NDArray[np.bool_]:
        return self.lanes[0].quick.closed

    def _rows(self, seconds: float, devices: Devices, *, apart: bool, least: float = 0.0) -> float:
        """The most rows of a pipeline on no more than these devices; what passes no more than the `least` is not looked for.

        Lanes that may pass most are looked at first, and those that pass most in halves.
        """
        number = count()
        waiting = [(-self._glance(lane, seconds, devices), next(number), lane) for lane in self.lanes]
        heapify(waiting)
        most = least
        while waiting and -waiting[0][0] > most:
            above, _, lane = heappop(waiting)
            if not lane.is_known(seconds):
                lane.glance(seconds)
                heappush(waiting, (max(above, -self._glance(lane, seconds, devices)), next(number), lane))
                continue
            micro_batches = self._micro_batches(lane, seconds, devices, (most, -above), apart=apart)
            if micro_batches * lane.rows <= most:
                continue
            if not lane.halves:
                most = float(micro_batches * lane.rows)
            for half in lane.halves:
                above = min(float(micro_batches * half.rows), self._glance(half, seconds, devices))
                heappush(waiting, (-above, next(number), half))
        return most

    def _glance(self, lane: Lane, seconds: float, devices: Devices) -> float:
        """The most rows, without regard to memory as long as the lane is not looked at with it."""
        glance = lane.glance(seconds, tight=lane.is_known(seconds))
        # Some with fewer devices than all may pass more at a glance: their nodes may be shared.
        return float(glance.max() if devices == self.shape else glance[devices])

    def _micro_batches(
        self, lane: Lane, seconds: float, devices: Devices, rows: tuple[float, float], *, apart: bool
    ) -> int:
        """The most that may keep within the seconds, where they have more rows than the first number and at most the second."""

        def keeps(micro_batches: int) -> bool:
            either = lane.keeps(seconds, devices, Ask(micro_batches, None), apart=apart)
            if not either or lane.halves or micro_batches == 1:
                return either
            return any(lane.keeps(seconds, devices, Ask(micro_batches, one), apart=apart) for one in Schedule)

        step, low, high = 1, int(rows[0] // lane.rows), int(rows[1] // lane.shares.fewest_rows)
        # One more than is known is mostly too much; where it is not, in growing steps, then by halves.
        while low < high:
            tried = min(low + step, (low + high + 1) // 2)
            if keeps(tried):
                low, step = tried, 2 * step
            else:
                high = tried - 1
        return low


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
