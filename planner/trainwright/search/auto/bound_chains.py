"""What it costs to pass one row through a pipeline in time: chains of stages, and when there is none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound_options import Array, Options
from trainwright.search.auto.bound_terms import Terms

_ROUNDS = 3
_WEIGHTS = (1.0, 3.0)
"""Of latency beside costs, in their proportion."""
_PROGRESS = 1e-3
_BEHIND = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 5), (6, 8), (9, 13), (14, 21), (22, 34), (35, 2000))
"""Numbers of stages behind a stage that share one table: with the memory of the fewest and the slack of the most."""
_ROUNDING_BYTES = 16
_ROUNDING = 1e-9
_NEVER = 1e30
"""Seconds of what memory rules out."""


@dataclass(frozen=True)
class Lane:
    """Pipelines with `least` … `most` micro-batches; `alone` where there is but one pipeline."""

    least: int
    most: int
    alone: bool


@dataclass
class Chains:
    """Chains at given prices of the devices (μ, by accelerator).

    A row that passes a pipeline of S stages is computed by one replica in each: a chain. With m micro-batches, V the
    seconds of a micro-batch along the chain and τ(s) those of its stage s (forward φ, backward b), the iteration takes

    (A) T >= V + (m - 1) τ(s) - min(m - 1, S - 1 - s) φ(s): stage s computes no backward before the first micro-batch
        was down and back, has done at most S - s forwards by then, has everything else of m micro-batches before it,
        and its last backward goes up to the first stage;
    (B) the same without the way up, Σ b(j) over j < s <= β (V - τ(s)), but with what stage s does behind its last
        backward: sums of gradients and the optimizer.

    A replica of t devices with r of the rows costs μ t / r for each row of a micro-batch, and m of them pass. All
    devices together are worth Σ N μ, and B rows have to pass: where the cheapest chain that keeps within T costs C a row
    and B C / m > Σ N μ for every m, no plan takes T. Rows, degrees and types are free from stage to stage and from chain
    to chain; layers stay whole.
    """

    terms: Terms
    prices: Array

    def __post_init__(self) -> None:
        options, problem = self.terms.options, self.terms.problem
        self.batch = problem.global_batch_size
        self.worth = float((np.array([reach.devices for reach in options.reach]) * self.prices).sum())
        self.cost = self.prices[options.accelerator] * options.density
        slow = problem.runtime.overlap_slowdown_ratio - 1
        self.hidden = min(slow, 1.0)
        self.spent = 0
        self._prepared: dict[tuple[int, bool], _Choices] = {}

    def choices(self, lane: Lane) -> _Choices:
        most_rows = self.batch // lane.least if lane.alone else max((self.batch - 1) // lane.least, 0)
        key = (most_rows, lane.least == 1)
        if key not in self._prepared:
            self._prepared[key] = _Choices(self, most_rows, single=lane.least == 1)
        return self._prepared[key]

    def possible(self, seconds: float, lane: Lane) -> bool:
        """Whether some chain may keep within so many seconds and what its row may cost."""
        choices = self.choices(lane)
        if not len(choices.cost):
            return False
        budget = self.worth * lane.most / self.batch
        return _Trial(self, choices, lane, seconds, budget).run()


class _Choices:
    """The options of a lane, with their tables [option, interval]."""

    def __init__(self, chains: Chains, most_rows: int, *, single: bool) -> None:
        terms, options = chains.terms, chains.terms.options
        self.single, self.most_rows = single, most_rows
        kept = np.flatnonzero(options.low <= most_rows)
        self.options = kept
        self.cost = chains.cost[kept]
        self.tensor = options.tensor[kept]
        self.low = options.low[kept]
        self.high = np.minimum(options.high[kept], most_rows)
        self.cost = self.cost * options.high[kept] / np.maximum(self.high, 1)
        self.accelerator = options.accelerator[kept]
        self.crosses = options.crosses[kept]
        most = np.minimum(len(terms.problem.devices) // self.tensor, most_rows - self.low + 1)
        self.replicas = np.maximum(most, 1)
        self.forward = terms.summed(options.forward[kept])
        self.backward = terms.summed(options.backward[kept])
        shares = {tensor: terms.updated_share(tensor) for tensor in set(self.tensor.tolist())}
        self.update = terms.summed(options.update[kept]) * np.stack([shares[one] for one in self.tensor.tolist()])
        both = options.forward[kept] + options.backward[kept]
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = np.where(both > 0, options.backward[kept] / both, 0.0)
            again = np.where(both > 0, both / (both + options.forward[kept]), 0.0)
        self.plain_share = float(shares.max(initial=0.0))
        self.again_share = float(again.max(initial=0.0))
        self._terms = terms
        self._recompute: dict[int, Array] = {}

    def recompute_seconds(self, kept: int) -> Array:
        """[option, interval] least seconds of computing activations again, so that the rest fits; infinite where none does."""
        if kept not in self._recompute:
            self._recompute[kept] = self._recomputed(kept)
        return self._recompute[kept]

    def _recomputed(self, kept: int) -> Array:
        terms, problem = self._terms, self._terms.problem
        memory = {one.name: one.memory_bytes for one in problem.setting.cluster.accelerators}
        names = terms.options.accelerators
        activation = terms.options.activation[self.options]
        forward = terms.options.forward[self.options]
        rate = (kept * activation / np.maximum(forward, 1e-300)).max(axis=1)
        held = terms.summed(activation)
        limit = np.array([memory[name] for name in names], dtype=np.float64)[self.accelerator]
        needed = kept * held + self.low[:, None] * terms.moving_bytes(kept)[None, :]
        needed += (problem.runtime.constant_bytes - limit)[:, None]
        for tensor in set(self.tensor.tolist()):
            mine = self.tensor == tensor
            needed[mine] += terms.state_bytes(tensor, self.replicas[mine], single=self.single)
            needed[mine] += self.low[mine][:, None] * terms.loss_bytes(tensor)[None, :]
        saved = kept * terms.summed_layers(
            np.maximum(activation[:, terms.kind_of] - self.low[:, None] * terms.input_bytes[None, :], 0.0)
        )
        again = np.where(needed > _ROUNDING_BYTES, needed / np.maximum(rate, 1e-300)[:, None], 0.0)
        found: Array = np.where(needed > saved + _ROUNDING_BYTES, _NEVER, again)
        return found



class _Trial:
    def __init__(self, chains: Chains, choices: _Choices, lane: Lane, seconds: float, budget: float) -> None:
        self.chains, self.choices, self.lane, self.seconds, self.budget = chains, choices, lane, seconds, budget
        self.terms = chains.terms
        self.holds_all: bool | None = None
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
        hidden = chains.hidden
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
        crossing = values / rates[min(2, len(rates) - 1)] / ranks
        if max(reach.group for reach in reaches) == 1:
            return crossing
        best = np.maximum(inside, rates[min(2, len(rates) - 1)])
        found: Array = values[None, :] / best / ranks
        return found

    @cached_property
    def messages(self) -> Array:
        """[option, interval] least seconds of its first layer's input, and of that one's gradient, where every device is a node."""
        choices, terms = self.choices, self.terms
        reaches = terms.options.reach
        if max(reach.group for reach in reaches) > 1:
            return np.zeros((1, len(terms.first)))
        rate = np.array([reach.between for reach in reaches]) * terms.problem.runtime.link_ratio
        found: Array = 2 * choices.low[:, None] * terms.incoming[None, :] / rate[choices.accelerator][:, None]
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
        latency = float(self._least(fastest[None, :], np.zeros(1))[0])
        if latency > self.seconds:
            return False
        for _ in range(_ROUNDS):
            before = latency
            for factor in _WEIGHTS:
                weight = factor * self.budget / max(before, 1e-300)
                least = self._cheapest(latency, weight)
                if math.isinf(least):
                    return False
                latency = max(latency, (least - self.budget) / weight)
            if latency > self.seconds:
                return False
            if latency <= before * (1 + _PROGRESS):
                break
        return self._cheapest(latency, 0.0) <= self.budget * (1 + _ROUNDING)

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
        spent = cost + weight * (both + messages) if weight else self._whole_cost[option]
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
        return max(self.choices.again_share if self._is_tight else self.choices.plain_share, 0.5)
