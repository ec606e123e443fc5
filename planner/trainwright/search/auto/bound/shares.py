"""What a micro-batch costs a stage on whole devices, by how many of each accelerator it has."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.memory import optimizer_bytes
from trainwright.search.auto.bound.copies import usable_bytes
from trainwright.search.auto.bound.ledger import STEP, Ledger
from trainwright.search.auto.bound.options import NEVER, Array
from trainwright.search.auto.bound.sums import all_reduce_seconds, owned_values, seen_share
from trainwright.search.auto.bound.terms import Terms
from trainwright.search.auto.bound.ways import Counts, Ways
from trainwright.search.protocol import Problem

_SAFE = 1 - 1e-6
_EXACT_REPLICAS = 2
_FORWARD_SHARES = (0.0, 0.125, 0.25, 0.375, 0.4375, 0.5, 0.625, 0.75, 1.0)
"""Of forwards among passes: in between, the line."""
_STARTS = 1.4
"""Ratio of the rows at which prices are tried."""


@dataclass(frozen=True)
class Load:
    """Micro-batches in flight in a stage, at least, and whether an iteration has but one."""

    kept: int
    single: bool


@dataclass(frozen=True)
class Shares:
    """Stages of one number of rows r in a micro-batch, which the replicas of a stage share.

    Every row of a micro-batch passes, in each stage, one replica, and waits there for all of that replica's rows. On
    average over the rows a layer takes Σ x(w) c(w, x(w)) / r, where replica w has x(w) of them and its c seconds. A
    replica of t devices is taken for t devices with its x rows each, which are free of each other: then t r rows are
    divided among n devices, at least one for each, so that Σ x c(x) / (t r) is least. For any price p of a row that is
    at least p + Σ min over x of (x c(x) - p x) / (t r); the best of several prices counts. The average of a stage is the
    sum of its layers' averages, so that each layer may have the degree, and divide the rows, as suits it best. For any
    number of rows from `least_rows` to `rows`, the lesser of both ends counts for every price.
    """

    problem: Problem
    terms: Terms
    ways: Ways
    counts: Counts
    rows: int
    least_rows: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    _weighted: dict[float, Array] = field(default_factory=dict)

    @property
    def fewest_rows(self) -> int:
        """Of a micro-batch."""
        return self.least_rows or self.rows

    @cached_property
    def most(self) -> tuple[int, ...]:
        """Devices of each accelerator."""
        return tuple(self.counts.max(axis=0).tolist())

    @cached_property
    def size(self) -> Counts:
        """[stage] devices."""
        found: Counts = self.counts.sum(axis=1)
        return found

    @cached_property
    def seconds(self) -> Array:
        """[way, stage, kind] least average seconds of a layer, forward and backward."""
        return self.weighted(1.0, 1.0)

    def weighted(self, forwards: float, backwards: float) -> Array:
        """[way, stage, kind] the same of so many forwards and so many backwards.

        How rows are best divided hangs on the share of forwards, and what is then least is concave in it: between two
        shares it is above the line.
        """
        total = forwards + backwards
        share = forwards / total if total > 0 else _FORWARD_SHARES[0]
        right = bisect_left(_FORWARD_SHARES, share)
        found = self._at_share(_FORWARD_SHARES[right])
        if _FORWARD_SHARES[right] > share:
            before, behind = _FORWARD_SHARES[right - 1], _FORWARD_SHARES[right]
            part = (share - before) / (behind - before)
            found = (1 - part) * self._at_share(before) + part * found
        return np.where(found < NEVER / 2, found * total, NEVER)

    def _at_share(self, share: float) -> Array:
        """[way, stage, kind] of one pass on average, of which such a share are forwards."""
        if share not in self._weighted:
            forward, backward = (table[:, :, : self.rows] for table in (self.ways.forward, self.ways.backward))
            both = np.where(forward < NEVER, share * forward + (1 - share) * backward, NEVER)
            parts = [self.divided(both[way], degree) for way, degree in enumerate(self.ways.degrees)]
            self._weighted[share] = np.stack(parts)
        return self._weighted[share]

    @cached_property
    def least(self) -> Array:
        """[stage, kind] the same of the best degree."""
        found: Array = self.seconds.min(axis=0)
        return found

    def divided(self, costs: Array, degree: int) -> Array:
        """[stage, kind] least average of costs [accelerator, rows - 1, kind] at a tensor degree."""
        counts, total = self.counts, float(degree * self.rows)
        found = np.full((len(counts), costs.shape[2]), NEVER)
        fewest = float(degree * self.fewest_rows)
        fits = (self.size % degree == 0) & (self.size <= total)
        if not fits.any():
            return found
        x = np.arange(1, self.rows + 1, dtype=np.float64)
        whole = costs * x[:, None]
        lots = np.unique(np.concatenate([self._even(degree, fits), self._spread()]))
        for kind in range(costs.shape[2]):
            prices = _slopes(whole[:, :, kind], lots)
            self.ledger.spend(len(prices) * (whole.shape[0] * whole.shape[1] + len(counts)) + STEP // 2)
            profit = (whole[:, :, kind][:, None, :] - prices[None, :, None] * x).min(axis=2)
            profits = counts[fits].astype(np.float64) @ profit
            found[fits, kind] = np.maximum((prices + np.minimum(profits / total, profits / fewest)).max(axis=1), 0.0)
        return np.minimum(np.where(found > NEVER / 1e6, NEVER, found), NEVER)

    def _even(self, degree: int, fits: NDArray[np.bool_]) -> Counts:
        return np.maximum(self.rows * degree // self.size[fits], 1).astype(np.intp)

    def _spread(self) -> Counts:
        if self.counts.shape[1] == 1:
            return np.array([], dtype=np.intp)
        found, value = [1], 1.0
        while value < self.rows:
            value = max(value * _STARTS, found[-1] + 1)
            found.append(min(int(value), self.rows))
        return np.array(found, dtype=np.intp)

    def tight(self, price: float, ask: Load, weights: tuple[float, float, float]) -> Array:
        """[stage, kind] least average of so many forwards, backwards and times what is behind them, and of memory.

        Memory costs the price for all of a device's, whose parts are the layer's state, as far as it is not shared out
        over the replicas, and the activations of the micro-batches kept, or its input alone and one more forward.
        """
        found = np.full((len(self.counts), self.ways.forward.shape[3]), NEVER)
        for way, degree in enumerate(self.ways.degrees):
            replicas = self.size // degree
            message = self.messages[way]
            for least, most in self._classes(degree):
                mine = (self.size % degree == 0) & (replicas >= least) & (replicas <= most)
                if mine.any():
                    costs = self.passes(way, price, ask.kept, weights[:2])
                    held = self.states(way, (least, most), float(message[mine].min()), price, ask, weights)
                    costs = np.where(costs < NEVER, costs + held[:, None, :], NEVER)
                    part = replace(self, counts=self.counts[mine], _weighted={})
                    found[mine] = np.minimum(found[mine], part.divided(costs, degree))
        return found

    def _classes(self, degree: int) -> list[tuple[int, int]]:
        """Numbers of replicas that are taken for one."""
        most = int(self.size.max()) // degree
        found, start = [], 1
        while start <= most:
            end = start if start <= _EXACT_REPLICAS else 2 * start - 1
            found.append((start, end))
            start = end + 1
        return found

    def passes(self, way: int, price: float, kept: int, weights: tuple[float, float]) -> Array:
        """[accelerator, rows - 1, kind] of forward and backward, and of activations."""
        forward, backward = (table[way][:, : self.rows] for table in (self.ways.forward, self.ways.backward))
        activation = self.ways.activation[way][:, : self.rows]
        x = np.arange(1, self.rows + 1, dtype=np.float64)[None, :, None]
        inputs = np.minimum(x * self.input_bytes, activation)
        each = price * kept / self.memory[:, None, None]
        forwards, backwards = weights
        plain = forwards * forward + backwards * backward + each * activation
        again = (forwards + backwards) * forward + backwards * backward + each * inputs
        return np.where(forward < NEVER, np.minimum(plain, again), NEVER)

    def states(  # noqa: PLR0913, PLR0917 - what the sharding of a layer costs
        self,
        way: int,
        replicas: tuple[int, int],
        message: float,
        price: float,
        ask: Load,
        weights: tuple[float, float, float],
    ) -> Array:
        """[accelerator, kind] of the best sharding: its state, its collectives in every pass and those at the end."""
        problem, model = self.problem, self.problem.model
        runtime = problem.runtime
        grad, weight = problem.setting.gradient_dtype.num_bytes, model.dtype.num_bytes
        rest = optimizer_bytes(model, problem.optimizer)
        hidden = seen_share(problem)
        held = self._held[way]
        summed = message * self.summed_values
        update = self.ways.update[way].min(axis=0) * self.ways.updated
        most = replicas[1]
        each = price / self.memory[:, None]
        forwards, backwards, ends = weights
        sums = summed * grad * (hidden if runtime.overlaps_gradients else 1.0)
        found: Array = each * held * (weight + grad + rest) + ends * (sums + update)
        if most > 1:
            last = grad / most if ask.single else grad
            early = hidden * grad / 2
            zero1 = grad / 2 if not runtime.overlaps_gradients else early
            options = (
                (weight + grad + rest / most, ends * (zero1 + weight / 2), 0.0),
                (weight + last + rest / most, ends * (early + weight / 2), 0.0),
                ((weight + rest) / most + last, ends * early, (forwards + backwards) / 2 * hidden * weight),
            )
            for size, behind, passes in options:
                cost = each * held * size + summed * (behind + passes) + ends * update / most
                found = np.minimum(found, cost)
        return found

    @cached_property
    def summed_values(self) -> Array:
        """[kind] values of a layer that its replicas sum or collect for certain, of all its ranks."""
        kinds = self.problem.model.kinds
        return np.array([kind.parameters - kind.shared_parameters for kind in kinds], dtype=np.float64) * _SAFE

    @cached_property
    def rank_values(self) -> Array:
        """[way, kind] the same of one of its ranks: all of them where the degree does not divide them."""
        setting, kinds = self.problem.setting, self.problem.model.kinds
        found = [
            [setting.values_at(kind, degree) - setting.shared_at(kind, degree) for kind in kinds]
            for degree in self.ways.degrees
        ]
        return np.maximum(np.array(found, dtype=np.float64), 0.0) * _SAFE

    @cached_property
    def owned_values(self) -> Array:
        """[way, kind] of weights that layers share: of one of the first one's ranks."""
        return np.stack([owned_values(self.problem, degree) for degree in self.ways.degrees]) * _SAFE

    def least_bytes(self, kept: int, *, single: bool) -> Array:
        """[stage, kind] what any device of the stage holds at least: one row, everything shared out or computed again."""
        return self.bytes_on(self.size, kept, single=single, whole=True)

    def bytes_on(self, devices: Counts, kept: int, *, single: bool, whole: bool) -> Array:
        """[stage, kind] the same of stages of so many devices, or fewer where these need not be whole replicas."""
        problem, model = self.problem, self.problem.model
        grad, weight = problem.setting.gradient_dtype.num_bytes, model.dtype.num_bytes
        rest = optimizer_bytes(model, problem.optimizer)
        found = np.full((len(devices), len(model.kinds)), np.inf)
        for way, degree in enumerate(self.ways.degrees):
            held = self._held[way]
            parts = np.maximum(devices // degree, 1)[:, None]
            state = held * ((weight + rest) / parts + (grad / parts if single else grad))
            activation = np.minimum(self.ways.activation[way].min(axis=(0, 1)), self.input_bytes)
            fits = (devices % degree == 0)[:, None] | (not whole)
            found = np.where(fits, np.minimum(found, state + kept * activation), found)
        return found

    @cached_property
    def memory(self) -> Array:
        """[accelerator] bytes that a plan decides on."""
        return usable_bytes(self.problem, self.terms.options.accelerators)

    @cached_property
    def input_bytes(self) -> Array:
        """[kind] least bytes per row of the input of its layers."""
        found = np.full(len(self.problem.model.kinds), np.inf)
        np.minimum.at(found, self.terms.kind_of, self.terms.input_bytes)
        return found

    @cached_property
    def messages(self) -> list[Array]:
        """By way: [stage] seconds of summing each byte of a layer's gradients."""
        ways = range(len(self.ways.degrees))
        return [all_reduce_seconds(self.terms, self.ways, self.counts, way) for way in ways]

    @cached_property
    def _held(self) -> list[Array]:
        """By way: [kind] values of a layer that a rank holds, a weight that several layers share in equal parts by each."""
        kinds = range(len(self.problem.model.kinds))
        return [np.array([self._values(kind, degree) for kind in kinds]) for degree in self.ways.degrees]

    def _values(self, number: int, degree: int) -> float:
        setting, kinds = self.problem.setting, self.problem.model.kinds
        kind = kinds[number]
        values = float(setting.values_at(kind, degree))
        if kind.shared_weight is not None:
            layers = [kinds[one] for one in self.terms.kind_of.tolist()]
            owners = sum(one.shared_weight == kind.shared_weight for one in layers)
            size = max(setting.shared_at(one, degree) for one in kinds if one.shared_weight == kind.shared_weight)
            values -= size * (1 - 1 / max(owners, 1))
        return max(values, 0.0)


def _slopes(whole: Array, lots: Counts) -> Array:
    """[price] what one more, and one less, of so many rows costs on each accelerator; of costs [accelerator, rows - 1]."""
    known, most = whole[whole[:, 0] < NEVER / 1e6], whole.shape[1]
    if not len(known):
        return np.zeros(1)
    if most == 1:
        return np.array([0.0, *known[:, 0]])
    here, before = np.clip(lots, 1, most - 1), np.clip(lots - 1, 1, most - 1)
    steps = [(known[:, at] - known[:, at - 1]).ravel() for at in (here, before)]
    return np.unique(np.maximum(np.concatenate([[0.0], *steps]), 0.0))
