"""What it costs to pass one row through a pipeline in time: chains of stages, and when there is none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainwright.search.auto.bound.choices import Choices
from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.terms import Terms
from trainwright.search.auto.bound.trial import Lane, Trial


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
        self.spent = 0
        self._prepared: dict[tuple[int, bool], Choices] = {}

    def choices(self, lane: Lane) -> Choices:
        most_rows = self.batch // lane.least if lane.alone else max((self.batch - 1) // lane.least, 0)
        key = (most_rows, lane.least == 1)
        if key not in self._prepared:
            self._prepared[key] = Choices(self.terms, self.cost, most_rows, single=lane.least == 1)
        return self._prepared[key]

    def possible(self, seconds: float, lane: Lane) -> bool:
        """Whether some chain may keep within so many seconds and what its row may cost."""
        choices = self.choices(lane)
        if not len(choices.cost):
            return False
        return Trial(self, choices, lane, seconds).run()
