"""RS, as AMP compares itself with (§4.5): strategies drawn without heuristics and without a cost model."""

from __future__ import annotations

import numpy as np

from trainwright.search.choice import Drafting, check_profiled, degrees_of, why_nothing_fits
from trainwright.search.degrees import Degrees, micro_batch_sizes
from trainwright.search.placement import Placement, megatron_placement
from trainwright.search.protocol import Candidate, Control, Problem
from trainwright.search.ranking import Draft, best_of

DRAWS = 50
_MOST_DRAWS = 1000
"""Drawn where none of the first DRAWS fits into memory, until one does."""

Strategy = tuple[Placement, int, tuple[int, ...]]
"""Devices by rank, rows, and the ends of the stages."""


def random_search(problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    """The feasible ones among 50 draws of degrees, micro-batch size, placement and layer assignment, best first.

    Every choice is uniform over what is open to it; the placement is any order of the devices. Raises NoFeasiblePlan
    where no draw fits into memory.
    """
    check_profiled(problem)
    drafting = Drafting.of(problem)
    generator = np.random.default_rng(control.seed)
    choices = [
        (degrees, sizes)
        for degrees in degrees_of(problem)
        if (sizes := micro_batch_sizes(problem.global_batch_size, degrees.data))
    ]
    drawn: list[Strategy] = []
    drafts: list[Draft] = []
    while choices and len(drawn) < (DRAWS if drafts else _MOST_DRAWS):
        placement, rows, ends = _draw(generator, choices, len(problem.model.layers))
        drawn.append((placement, rows, ends))
        stages = drafting.tables.stages(placement)
        if drafting.fits(stages, rows, ends):
            drafts.append(drafting.draft(stages, rows, ends))
        if drafts and control.expired():
            break
    if not drafts:
        raise why_nothing_fits(problem, (drafting.plan(*strategy) for strategy in drawn))
    return best_of(problem, drafts, control, top)


def _draw(
    generator: np.random.Generator, choices: list[tuple[Degrees, tuple[int, ...]]], layers: int
) -> tuple[Placement, int, tuple[int, ...]]:
    degrees, sizes = choices[int(generator.integers(len(choices)))]
    rows = sizes[int(generator.integers(len(sizes)))]
    ordered = megatron_placement(degrees)
    placement = generator.permutation(ordered.reshape(-1)).reshape(ordered.shape)
    cuts = np.sort(generator.choice(np.arange(1, layers), degrees.pipeline - 1, replace=False))
    return placement, rows, (*cuts.tolist(), layers)
