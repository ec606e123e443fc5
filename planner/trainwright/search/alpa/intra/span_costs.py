"""Costs of every span of layers on a logical mesh, at several memory prices and in mixtures of them.

Equal layers all change their assignment at the same memory price, so a price finds a run's fastest assignment and one
of much less memory, but nothing between. Most assignments between are mixtures, in which the first layers follow one
objective and the rest another, except about one layer of a run (the Shapley–Folkman theorem for sums under one limit).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import Array
from trainwright.cost.operators.layer_specs import LayerAssignment
from trainwright.search.alpa.intra.layer_chain_dp import COST_TERMS, LayerCostTable, LayerTable, SpecChain
from trainwright.search.alpa.intra.nearest_degrees import SpanSharding

PRICE_RATIOS: Final = (0.0, *(0.003 * 2.0**step for step in range(15)))
"""Memory prices tried: the price of a device's whole memory, in multiples of an iteration's balanced compute seconds."""

IN_FLIGHT_COUNTS: Final = (1, 4)
"""Numbers of micro-batches in flight assumed, each with every price."""

MAX_PRICES: Final = 5
"""Maximum number of distinct memory prices kept for each in-flight count, evenly spaced."""

MIXED_SHARES: Final = (0.25, 0.5, 0.75)
"""Fractions of a run's layers that follow the lower of two adjacent prices; the others follow the higher one."""


def memory_prices(tables: Sequence[LayerTable]) -> list[list[int]]:
    """Return for each in-flight count the indices of objectives with distinct assignments, by ascending price.

    `tables` are the model's layers under the objectives (in-flight count, price), prices innermost. Objectives that
    give equal costs share the first one's index.
    """
    parts = np.sum([table.steady_costs() for table in tables], axis=0)
    goal_of: dict[tuple[float, ...], int] = {}
    numbers = [
        goal_of.setdefault(tuple(float(f"{part:.9g}") for part in parts[:, goal]), goal)
        for goal in range(parts.shape[1])
    ]
    chosen = []
    for count in range(len(IN_FLIGHT_COUNTS)):
        distinct = list(dict.fromkeys(numbers[count * len(PRICE_RATIOS) : (count + 1) * len(PRICE_RATIOS)]))
        steps = np.linspace(0, len(distinct) - 1, min(len(distinct), MAX_PRICES)).round().astype(int)
        chosen.append([distinct[number] for number in steps])
    return chosen


Indices = NDArray[np.int64]


@dataclass(frozen=True)
class ReversedTable:
    """Layer table with entering and leaving states exchanged, for a chain from the last layer to the first."""

    objective: Array
    parts: Array

    @classmethod
    def of(cls, table: LayerCostTable) -> ReversedTable:
        return cls(table.objective.swapaxes(2, 3), table.parts.swapaxes(3, 4))


@dataclass(frozen=True)
class MixedAssignments:
    """Best assignments for each mixture: a pair of objectives and a fraction of the layers.

    Attributes:
        parts: `[cost term, mixture, first, end]`; inf where a run has fewer than two layers.
        pairs: per mixture, the objectives of the first layers and of the rest.
        switch_boundaries: `[mixture, first, end]` the layer boundary between them.
    """

    forward: SpecChain
    backward: SpecChain
    parts: Array
    pairs: tuple[tuple[int, int], ...]
    switch_boundaries: Indices
    _states: Indices

    @classmethod
    def of(cls, forward: SpecChain, pairs: Sequence[tuple[int, int]], shares: Sequence[float]) -> MixedAssignments:
        """Build mixtures of every pair of objectives with every fraction of a run's layers under the first of the pair."""
        layers = len(forward.tables)
        turned = {id(table): ReversedTable.of(table) for table in forward.tables}
        backward = SpecChain([turned[id(table)] for table in reversed(forward.tables)])
        shape = (len(pairs), len(shares), layers, layers + 1)
        parts: Array = np.full((COST_TERMS, *shape), np.inf)
        states: Indices = np.zeros(shape, dtype=np.int16)
        first_goal = np.array([first for first, _ in pairs])[:, None]
        second_goal = np.array([second for _, second in pairs])[:, None]
        for turn in range(1, layers):
            number, first, end = _runs_by_switch(layers, tuple(shares))[turn]
            prefix, suffix = forward.endings[turn], backward.endings[layers - turn]
            joint = prefix.objective[first_goal, first] + suffix.objective[second_goal, layers - end]
            best = joint.argmin(axis=2)
            states[:, number, first, end] = best
            costs = prefix.parts[:, first_goal, first, best] + suffix.parts[:, second_goal, layers - end, best]
            parts[:, :, number, first, end] = costs
        turns = np.stack([_turns(layers, share) for share in shares])
        return cls(
            forward,
            backward,
            parts.reshape(COST_TERMS, -1, layers, layers + 1),
            tuple(pair for pair in pairs for _ in shares),
            np.tile(turns, (len(pairs), 1, 1)),
            states.reshape(-1, layers, layers + 1),
        )

    def states(self, mixture: int, first: int, end: int) -> list[int]:
        """Return the states at the boundaries `first … end`."""
        layers = len(self.forward.tables)
        turn, state = int(self.switch_boundaries[mixture, first, end]), int(self._states[mixture, first, end])
        first_goal, other = self.pairs[mixture]
        behind = self.backward.states(other, layers - end, layers - turn, state)
        return [*self.forward.states(first_goal, first, turn, state), *behind[-2::-1]]

    def goals(self, mixture: int, first: int, end: int) -> list[int]:
        """Return the objective of every layer of a run."""
        turn, (first_goal, other) = int(self.switch_boundaries[mixture, first, end]), self.pairs[mixture]
        return [first_goal] * (turn - first) + [other] * (end - turn)


@lru_cache(maxsize=32)
def _turns(layers: int, share: float) -> Indices:
    """Return `[first, end]` the boundary after that fraction of the layers, with at least one layer on either side."""
    first, end = np.ogrid[:layers, : layers + 1]
    turns = first + np.rint(share * (end - first)).astype(np.int64)
    boundaries: Indices = np.minimum(np.maximum(turns, first + 1), end - 1)
    return boundaries


@lru_cache(maxsize=8)
def _runs_by_switch(layers: int, shares: tuple[float, ...]) -> tuple[tuple[Indices, Indices, Indices], ...]:
    """Return per boundary the (fraction index, first, end) of runs of at least two layers that switch objectives there."""
    first, end = np.indices((layers, layers + 1))
    turns = np.stack([_turns(layers, share) for share in shares])
    long = (end - first) >= 2
    return tuple(tuple(np.nonzero((turns == turn) & long)) for turn in range(layers))  # type: ignore[misc]


@dataclass(frozen=True)
class SpanCosts:
    """Costs per device of the layers `first … end - 1`, by `[first, end]`.

    Arrays have the shape `[layers, layers + 1]`; inf where end <= first, and for mixtures also where a run has one
    layer.

    Attributes:
        seconds: forward and backward of one micro-batch with communication.
        iteration_seconds: gradient reduction and optimizer step.
        state_bytes: weights, gradients and optimizer state, after the rewriting of §4.2.
        activation_bytes: one micro-batch in flight.
        assignments: function of (first, end): (weight mode, algorithm) of the nodes of every layer.
        describe: function of (first layer, assignments) that exports their specs.
    """

    seconds: Array
    iteration_seconds: Array
    state_bytes: Array
    activation_bytes: Array
    assignments: Callable[[int, int], Sequence[LayerAssignment]]
    describe: Callable[[int, Sequence[LayerAssignment]], SpanSharding]

    def sharding(self, first: int, end: int) -> SpanSharding:
        """Return operator specs of the layers `first … end - 1`, with the nearest degrees of a plan."""
        return self.describe(first, self.assignments(first, end))


@dataclass
class RunCosts:
    """Costs of all runs of a model's layers on one mesh.

    Attributes:
        tables: layers in order; identical layers share one.
        shared_weight_overcount: `[first, end]` fraction of the largest shared weight's bytes and seconds that a run counts
            redundantly.
        describe: function of (first layer, assignments) that exports their specs.
    """

    tables: Sequence[LayerTable]
    shared_weight_overcount: Array
    describe: Callable[[int, Sequence[LayerAssignment]], SpanSharding]

    def by_goal(self) -> tuple[SpanCosts, ...]:
        """Return costs for each objective."""
        chain = SpecChain(self.tables)
        chain.endings.clear()  # `endings` are large, and tracing a run back does not need them
        return tuple(self._of_goal(chain, goal) for goal in range(chain.parts.shape[1]))

    def with_mixtures(self, pairs: Sequence[tuple[int, int]], shares: Sequence[float]) -> tuple[SpanCosts, ...]:
        """Return costs for each objective, then for each mixture of these pairs and fractions."""
        chain = SpecChain(self.tables)
        plain = tuple(self._of_goal(chain, goal) for goal in range(chain.parts.shape[1]))
        if not pairs or len(chain.tables) < 2:
            return plain
        mixtures = MixedAssignments.of(chain, pairs, shares)
        chain.endings.clear()
        mixtures.backward.endings.clear()
        return (*plain, *(self._of_mixture(mixtures, number) for number in range(len(mixtures.pairs))))

    def _of_goal(self, chain: SpecChain, goal: int) -> SpanCosts:
        def assignments(first: int, end: int) -> list[LayerAssignment]:
            return self._assignments(first, chain.states(goal, first, end), [goal] * (end - first))

        return self._costs(chain.parts[:, goal], assignments)

    def _of_mixture(self, mixtures: MixedAssignments, number: int) -> SpanCosts:
        def assignments(first: int, end: int) -> list[LayerAssignment]:
            return self._assignments(first, mixtures.states(number, first, end), mixtures.goals(number, first, end))

        return self._costs(mixtures.parts[:, number], assignments)

    def _costs(self, parts: Array, assignments: Callable[[int, int], Sequence[LayerAssignment]]) -> SpanCosts:
        seconds, *counted, activation = parts[:4]
        owned = np.where(self.shared_weight_overcount > 0, parts[4:], 0.0) * self.shared_weight_overcount
        iteration, state = np.where(np.isfinite(seconds), np.array(counted) - owned, np.inf)
        return SpanCosts(seconds, iteration, state, activation, assignments, self.describe)

    def _assignments(self, first: int, states: Sequence[int], goals: Sequence[int]) -> list[LayerAssignment]:
        steps = zip(self.tables[first : first + len(goals)], goals, pairwise(states), strict=True)
        return [table.assignment(goal, *between) for table, goal, between in steps]
