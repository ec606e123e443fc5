"""AMP's Algorithm 2: simulated annealing over degrees, micro-batch sizes and domino placements (§6.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trainwright.search.choice import Drafting, check_profiled, degrees_of, why_nothing_fits
from trainwright.search.degrees import Degrees, micro_batch_sizes
from trainwright.search.dominoes import domino_placement
from trainwright.search.placement import Placement, megatron_placement
from trainwright.search.protocol import Candidate, Control, Problem
from trainwright.search.ranking import best_of
from trainwright.search.stages import Stages

ITERATIONS = 300
LAST_TEMPERATURE = 0.01
"""The first is 1, in units of the start's cost, so that the walk is the same in whatever unit time is told."""
RECORDED = 48
"""How many of the accepted strategies, those that are best by Eq. 4, are costed exactly ("run top predicted")."""


def amp_annealing(problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    """Candidates by Algorithm 2, best first by the exact replay.

    A neighbour keeps dp and draws tmp, or keeps tmp and draws dp (half and half); then it draws a micro-batch size
    and a placement, and gets the optimum of Eq. 5 on the stages so placed; Eq. 4 is its cost. Strategies that do not
    fit into memory are not accepted. The start is the first that fits in Megatron's order: the smallest tensor ×
    pipeline degree and micro-batch size. The temperature falls geometrically.

    Corrections to the algorithm as printed: it accepts where `randn() < acc_prob` and branches on `randn() > 0.5`,
    here the draws are uniform, so that a chance of ½ or of acc_prob is one; it calls pipe_ast(s), here the neighbour
    is assigned, whose degrees and placement it is for; lines 12–20 are indented under `else`, here they follow both
    branches; and the accepted neighbour is what the walk goes on from.

    Raises NoFeasiblePlan, with what comes closest, where no start fits.
    """
    check_profiled(problem)
    walk = _Walk(problem, control)
    here = walk.start()
    if here is None:
        raise why_nothing_fits(problem, walk.drafting.unlimited_plans())
    scale = here.seconds
    record = {here}
    for iteration in range(ITERATIONS):
        following = walk.neighbour(here)
        if following is not None:
            temperature = scale * LAST_TEMPERATURE ** (iteration / ITERATIONS)
            if walk.generator.random() < math.exp(min(here.seconds - following.seconds, 0.0) / temperature):
                here = following
                record.add(here)
        control.step(iteration + 1, ITERATIONS + RECORDED)
        if control.expired():
            break
    best = sorted(record, key=lambda strategy: (strategy.seconds, strategy.number))[:RECORDED]
    drafts = [walk.drafting.draft(strategy.stages, strategy.rows, strategy.ends) for strategy in best]
    return best_of(problem, drafts, control, top, done=ITERATIONS)


@dataclass(frozen=True, eq=False)
class _Strategy:
    """A state of the walk, the `number`-th that was met; `seconds` is its cost by Eq. 4."""

    number: int
    degrees: Degrees
    stages: Stages
    rows: int
    ends: tuple[int, ...]
    seconds: float


class _Walk:
    def __init__(self, problem: Problem, control: Control) -> None:
        self.drafting = Drafting.of(problem)
        self.generator = np.random.default_rng(control.seed)
        self.known: dict[tuple[bytes, Degrees, int], _Strategy | None] = {}
        self.sizes = {
            degrees: sizes
            for degrees in degrees_of(problem)
            if (sizes := micro_batch_sizes(problem.global_batch_size, degrees.data))
        }

    def start(self) -> _Strategy | None:
        """The first strategy that fits, in Megatron's order."""
        for degrees in sorted(self.sizes, key=lambda degrees: (degrees.tensor * degrees.pipeline, degrees)):
            for rows in self.sizes[degrees]:
                strategy = self._strategy(degrees, rows, megatron_placement(degrees))
                if strategy is not None:
                    return strategy
        return None

    def neighbour(self, here: _Strategy) -> _Strategy | None:
        """A random neighbour; None where it does not fit into memory."""
        if self.generator.random() > 0.5:
            near = [degrees for degrees in self.sizes if degrees.data == here.degrees.data]
        else:
            near = [degrees for degrees in self.sizes if degrees.tensor == here.degrees.tensor]
        degrees = near[int(self.generator.integers(len(near)))]
        rows = self.sizes[degrees][int(self.generator.integers(len(self.sizes[degrees])))]
        placement = domino_placement(self.drafting.order.nodes, degrees, self.generator)
        return self._strategy(degrees, rows, placement)

    def _strategy(self, degrees: Degrees, rows: int, placement: Placement) -> _Strategy | None:
        key = placement.tobytes(), degrees, rows
        if key not in self.known:
            self.known[key] = self._assigned(degrees, rows, placement)
        return self.known[key]

    def _assigned(self, degrees: Degrees, rows: int, placement: Placement) -> _Strategy | None:
        stages = self.drafting.tables.stages(placement)
        ends = self.drafting.assignment(stages, rows)
        if ends is None:
            return None
        return _Strategy(len(self.known), degrees, stages, rows, ends, self.drafting.amp_seconds(stages, rows, ends))
