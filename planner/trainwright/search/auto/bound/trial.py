"""Whether a row can pass a pipeline in time and at its price: the cheapest chain of stages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.choices import Choices
from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.terms import Terms

_WEIGHTS = (1.0, 3.0, 1.0, 2.0)
"""Of latency beside costs, in their proportion, one after the other."""
_BEHIND = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 5), (6, 8), (9, 13), (14, 21), (22, 34), (35, 2000))
"""Numbers of stages behind a stage that share one table: with the memory of the fewest and the slack of the most."""
_ROUNDING = 1e-9
_GATHERS_EVEN = 2.0
"""Up to this slow-down collecting weights lengthens a forward at least as much as a backward."""


@dataclass(frozen=True)
class Lane:
    """Pipelines with `least` … `most` micro-batches; `alone` where there is but one pipeline."""

    least: int
    most: int
    alone: bool


class Purse(Protocol):
    """What the devices are worth, at which prices, and how much was looked at."""

    terms: Terms
    prices: Array
    batch: int
    worth: float
    spent: int


class Trial:
    """Whether chains of one lane keep within some seconds and a budget."""

    def __init__(self, chains: Purse, choices: Choices, lane: Lane, seconds: float) -> None:
        self.chains, self.choices, self.lane, self.seconds = chains, choices, lane, seconds
        self.budget = chains.worth * lane.most / chains.batch
        self.terms = chains.terms
        self.holds_all: bool | None = None
        self.whole = False
        self.size = len(self.terms.problem.model.layers)

    @cached_property
    def after(self) -> Array:
        """[option, interval] least seconds behind the last backward: gradients summed, weights updated."""
        chains, choices, terms, lane = self.chains, self.choices, self.terms, self.lane
        problem = terms.problem
        runtime, ratio = problem.runtime, problem.runtime.link_ratio
        nodes = np.ceil(chains.batch * terms.node_seconds / self.seconds * (1 - 1e-9))
        rates = terms.ring_rates
        spanned = np.clip(nodes, 1, len(rates) - 1).astype(np.intp)
        inside_rate = np.array([reach.inside * ratio for reach in terms.options.reach])[choices.accelerator]
        values = terms.own_values * (1 - 1e-6)
        within = values[None, :] / (choices.tensor * inside_rate)[:, None]
        if lane.alone:
            crossing = 2 * (spanned - 1) / spanned / rates[spanned] * values
        else:
            crossing = self._apart * values / rates[min(2, len(rates) - 1)]
        crossing = crossing[None, :] / np.where(choices.crosses, choices.tensor, 1)[:, None]
        # Where a node has no room for two replicas, there are two nodes, whatever their devices could do.
        ranks = 2 * choices.tensor if lane.alone else choices.tensor + 1
        roomy = choices.crosses | (ranks <= max(reach.group for reach in terms.options.reach))
        apart = values / rates[2] if len(rates) > 2 else np.zeros_like(values)
        least = np.where(roomy[:, None], 0.0, apart[None, :])
        per_value = np.where((nodes > 1)[None, :], np.maximum(crossing, least), np.where(roomy[:, None], within, least))
        grad, weight = problem.setting.gradient_dtype.num_bytes, problem.model.dtype.num_bytes
        hidden = min(runtime.overlap_slowdown_ratio - 1, 1.0)
        backward = choices.backward + (choices.forward if self._is_tight else 0.0)
        scattered = grad / 2 * per_value
        gathered = per_value * min(weight / 2, hidden * weight * lane.least)
        sharded = np.maximum(scattered - (1 - hidden) * backward, hidden * scattered) + gathered
        replicas = choices.replicas
        sharded = sharded + choices.update / replicas[:, None]
        plain = grad * per_value
        if runtime.overlaps_gradients and lane.alone:
            plain = np.maximum(plain - (1 - hidden) * backward, hidden * plain)
        synced = np.minimum(plain + choices.update, sharded)
        if lane.alone:
            whole = choices.high * lane.most >= chains.batch
            synced = np.where(whole[:, None], np.minimum(synced, choices.update), synced)
            only = choices.low * lane.most >= chains.batch
            synced = np.where(only[:, None], choices.update, synced)
        return synced

    @cached_property
    def shared(self) -> Array:
        """[option, interval] least seconds of summing weights that other stages hold, too: whole, behind everything."""
        choices, terms = self.choices, self.terms
        ratio, reaches = terms.problem.runtime.link_ratio, terms.options.reach
        values = terms.apart_values * (1 - 1e-6) * terms.problem.setting.gradient_dtype.num_bytes
        rates, ranks = terms.ring_rates, choices.tensor[:, None]
        inside = np.array([reach.inside * ratio for reach in reaches])[choices.accelerator][:, None]
        crossing: Array = values[None, :] / rates[min(2, len(rates) - 1)] / ranks
        if max(reach.group for reach in reaches) == 1:
            return crossing
        best = np.maximum(inside, rates[min(2, len(rates) - 1)])
        found: Array = values[None, :] / best / ranks
        return found

    @cached_property
    def messages(self) -> Array:
        """[option, interval] least seconds of its first layer's input, and of that one's gradient, where every device is a node.

        Nothing where boundaries are sent in parts.
        """
        choices, terms = self.choices, self.terms
        reaches = terms.options.reach
        if max(reach.group for reach in reaches) > 1 or terms.problem.runtime.splits_boundaries:
            return np.zeros((1, len(terms.first)))
        rate = np.array([reach.between for reach in reaches]) * terms.problem.runtime.link_ratio
        # Of the pieces of a message the one along the chain may have a single row.
        found: Array = 2 * terms.incoming[None, :] / rate[choices.accelerator][:, None]
        return found

    @property
    def _apart(self) -> Array | float:
        """[interval] the least share of layers that several nodes hold, where pipelines have stages of several lengths.

        Whose layers J one node alone holds, for all pipelines, has their stages in that node: its devices compute J for
        all B rows, and all layers of the stage for those of this pipeline, of which there are at least m.
        """
        terms, batch = self.terms, self.chains.batch
        if max(reach.group for reach in terms.options.reach) == 1:
            return 1.0
        mine = self.lane.least * terms.node_seconds
        left = np.maximum(self.seconds - mine, 0.0) / (batch - self.lane.least)
        return np.clip(1 - left / np.maximum(terms.node_seconds, 1e-300), 0.0, 1.0)

    @cached_property
    def _whole_cost(self) -> Array:
        """[option] a stage's cost where devices are whole: n replicas have M rows, so that one has at least M / n.

        Of one type only; several of them may share the rows so that none is left over.
        """
        choices, lane = self.choices, self.lane
        if not lane.alone or len(self.terms.options.reach) > 1:
            return choices.cost
        rows = self.chains.batch // lane.least
        replicas = -(-rows // choices.high)
        found: Array = self.chains.prices[choices.accelerator] * choices.tensor * replicas / rows
        return found

    def run(self) -> bool:
        """False where no chain keeps within the seconds and the budget."""
        if not self.terms.shared_names:
            return self._may_keep()
        # The first stage holds shared weights alone, or is done with them last, behind everything.
        self.holds_all = True
        if self._may_keep():
            return True
        self.holds_all = False
        return self._may_keep()

    def _may_keep(self) -> bool:
        choices = self.choices
        fastest = (choices.forward + choices.backward).min(axis=0)
        shortest = latency = float(self._least(fastest[None, :], np.zeros(1))[0])
        if latency > self.seconds:
            return False
        for factor in _WEIGHTS:
            weight = factor * self.budget / max(latency, 1e-300)
            least = self._cheapest(latency, weight)
            if math.isinf(least):
                return False
            latency = max(latency, (least - self.budget) / weight)
            if latency > self.seconds:
                return False
        most = self.budget * (1 + _ROUNDING)
        if self._cheapest(latency, 0.0) > most:
            return False
        # The slowest replica of a stage may be on a chain that costs more than others: no latency is known of that.
        self.whole = True
        found = self._cheapest(shortest, 0.0) <= most
        self.whole = False
        return found

    def _least(self, table: Array, cost: Array) -> Array:
        """[1] the least sum of a chain's intervals."""
        matrix = np.full((self.size, self.size + 1), np.inf)
        matrix[self.terms.first, self.terms.end] = (table + cost[:, None]).min(axis=0)
        best = np.full(self.size + 1, np.inf)
        best[self.size] = 0.0
        for first in range(self.size - 1, -1, -1):
            best[first] = (matrix[first] + best).min()
        return best[:1]

    def _cheapest(self, latency: float, weight: float) -> float:
        """Least Σ (cost + weight · τ) of a chain whose stages keep within the seconds, given that V >= latency."""
        best = np.full(self.size + 1, np.inf)
        best[self.size] = 0.0
        found, limit = math.inf, self.budget + weight * self.seconds
        most = min(self.size, self.terms.problem.limits.max_pipeline_degree or self.size)
        for least_behind, most_behind in _BEHIND:
            edges = self._edges(latency, weight, least_behind, most_behind)
            for _ in range(least_behind, min(most_behind + 1, most)):
                best = np.append((edges + best[None, :]).min(axis=1), np.inf)
                found = min(found, float(best[0]))
                if best.min() > min(limit, found):
                    return found
            if most_behind + 1 >= most:
                break
        return found

    @cached_property
    def _pairs(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """Options and intervals that may keep within the seconds and the budget at all, and where each interval starts."""
        choices, least = self.choices, self.lane.least
        steady = least * choices.backward + max(least - self.size, 1) * choices.forward
        affordable = choices.cost <= self.budget * (1 + _ROUNDING)
        kept = (steady <= self.seconds) & (self.after <= self.seconds) & affordable[:, None]
        interval, option = np.nonzero(kept.T)
        starts = np.flatnonzero(np.diff(interval, prepend=-1))
        return option, interval, starts

    @cached_property
    def _gathered(self) -> tuple[Array, Array, Array, Array, Array, Array]:
        """[pair] forward, backward, sums behind, of shared weights, messages, and cost."""
        option, interval, _ = self._pairs
        choices = self.choices
        messages = np.broadcast_to(self.messages, choices.forward.shape)
        tables = (choices.forward, choices.backward, self.after, self.shared, messages)
        first, second, third, fourth, fifth = (table[option, interval] for table in tables)
        return first, second, third, fourth, fifth, choices.cost[option]

    def _edges(self, latency: float, weight: float, least_behind: int, most_behind: int) -> Array:
        """[first, end] the cheapest stage of these layers with so many stages behind it."""
        terms, least = self.terms, self.lane.least
        option, interval, starts = self._pairs
        matrix = np.full((self.size, self.size + 1), np.inf)
        self.chains.spent += len(option)
        if not len(option):
            return matrix
        forward, backward, after, shared, messages, cost = self._gathered
        again = self.choices.recompute_seconds(min(least, least_behind + 1))[option, interval]
        both = forward + backward + again
        up = latency + (least - 1) * both - min(least - 1, most_behind) * forward
        at_first = (terms.first == 0)[interval]
        slack = np.where(at_first, 0.0, self.share)
        own = up - slack * (latency - both) + after
        if self.holds_all is not None:
            apart = (terms.apart_values > 0)[interval]
            if self.holds_all:
                excluded = at_first & apart
            else:
                excluded = at_first & ~apart
                up = up + self._first_shared
                own = own + np.where(at_first, shared, 0.0)
            own = np.where(excluded, np.inf, own)
        spent = (
            cost + weight * (both + messages)
            if weight
            else (self._whole_cost if self.whole else self.choices.cost)[option]
        )
        total = np.where((up <= self.seconds) & (own <= self.seconds), spent, np.inf)
        met = interval[starts]
        matrix[terms.first[met], terms.end[met]] = np.minimum.reduceat(total, starts)
        return matrix

    @cached_property
    def _first_shared(self) -> float:
        """Least seconds of summing the weights that the first stage shares with others."""
        first = self.shared[:, (self.terms.first == 0) & (self.terms.apart_values > 0)]
        return float(first.min()) if first.size else 0.0

    @cached_property
    def _is_tight(self) -> bool:
        """Whether some stage has to compute activations again."""
        return bool((self.choices.recompute_seconds(min(self.lane.most, self.size)) > 0).any())

    @cached_property
    def share(self) -> float:
        """β: the largest share that a backward has of a stage's time."""
        if self.terms.problem.runtime.overlap_slowdown_ratio > _GATHERS_EVEN:
            return 1.0
        return self.choices.again_share if self._is_tight else self.choices.plain_share
