"""All runs of consecutive layers: the chain of their tables, mixtures of goals, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwright.operator_specs import SpanSpecs
from trainwright.search.alpa.intra.chain import Chain
from trainwright.search.alpa.intra.description import Assignment
from trainwright.search.alpa.intra.mixtures import Mixtures
from trainwright.search.alpa.intra.spans import SpanCosts
from trainwright.search.alpa.intra.tables import LayerTable

Array = NDArray[np.float64]


@dataclass
class Runs:
    """All runs of a model's layers on one mesh.

    Attributes:
        tables: of the layers, in order; identical layers share one.
        repeated: [first, end] what share of the largest shared weight's bytes a run counts too much.
        described: makes the document of a run from its first layer and (held, algorithm) of every layer's nodes.
    """

    tables: Sequence[LayerTable]
    repeated: Array
    described: Callable[[int, Sequence[Assignment]], SpanSpecs]

    def plain(self) -> tuple[SpanCosts, ...]:
        """By goal."""
        chain = Chain(self.tables)
        chain.endings.clear()  # the rest of it is kept with the costs, to describe runs that are asked for
        return tuple(self._of_goal(chain, goal) for goal in range(chain.parts.shape[1]))

    def mixed(self, pairs: Sequence[tuple[int, int]], shares: Sequence[float]) -> tuple[SpanCosts, ...]:
        """By goal, then by mixture of these pairs of goals, each in these shares."""
        chain = Chain(self.tables)
        plain = tuple(self._of_goal(chain, goal) for goal in range(chain.parts.shape[1]))
        if not pairs or len(chain.tables) < 2:
            return plain
        mixtures = Mixtures.of(chain, pairs, shares)
        chain.endings.clear()
        mixtures.backward.endings.clear()
        return (*plain, *(self._of_mixture(mixtures, number) for number in range(len(mixtures.pairs))))

    def _of_goal(self, chain: Chain, goal: int) -> SpanCosts:
        def assignments(first: int, end: int) -> list[Assignment]:
            return self._assignments(first, chain.states(goal, first, end), [goal] * (end - first))

        return self._costs(chain.parts[:, goal], assignments)

    def _of_mixture(self, mixtures: Mixtures, number: int) -> SpanCosts:
        def assignments(first: int, end: int) -> list[Assignment]:
            return self._assignments(first, mixtures.states(number, first, end), mixtures.goals(number, first, end))

        return self._costs(mixtures.parts[:, number], assignments)

    def _costs(self, parts: Array, assignments: Callable[[int, int], Sequence[Assignment]]) -> SpanCosts:
        seconds, iteration, state, activation, owned = parts
        once = state - np.where(self.repeated > 0, owned, 0.0) * self.repeated
        state = np.where(np.isfinite(seconds), once, np.inf)
        return SpanCosts(seconds, iteration, state, activation, assignments, self.described)

    def _assignments(self, first: int, states: Sequence[int], goals: Sequence[int]) -> list[Assignment]:
        steps = zip(self.tables[first : first + len(goals)], goals, pairwise(states), strict=True)
        return [table.assignment(goal, *between) for table, goal, between in steps]
