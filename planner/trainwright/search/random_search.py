"""Random search (RS) as in AMP's comparison (§4.5): strategies drawn without heuristics or a cost model."""

from __future__ import annotations

import numpy as np

from trainwright.search.candidates import LazyCandidate, best_of
from trainwright.search.degrees import Degrees, micro_batch_sizes
from trainwright.search.problem import Candidate, Problem, SearchControl
from trainwright.search.uniform.placed_stages import Placement, megatron_placement
from trainwright.search.uniform.plan_space import UniformPlanSpace, check_profiled, infeasibility_error, open_degrees

DRAWS = 50
_MAX_DRAWS = 1000
"""Maximum draws, if none of the first DRAWS fits into memory."""

Strategy = tuple[Placement, int, tuple[int, ...]]
"""Placement, rows, and ends of the stages."""


def random_search(problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
    """Return the feasible plans among 50 draws of degrees, micro-batch size, placement and layer assignment, best first.

    Each choice is uniform over its valid values; the placement is a random permutation of the devices. Raises NoFeasiblePlan
    if no draw fits into memory.
    """
    check_profiled(problem)
    plan_space = UniformPlanSpace.of(problem)
    generator = np.random.default_rng(control.seed)
    choices = [
        (degrees, sizes)
        for degrees in open_degrees(problem)
        if (sizes := micro_batch_sizes(problem.global_batch_size, degrees.data))
    ]
    strategies: list[Strategy] = []
    candidates: list[LazyCandidate] = []
    while choices and len(strategies) < (DRAWS if candidates else _MAX_DRAWS):
        placement, rows, ends = _draw(generator, choices, len(problem.model.layers))
        strategies.append((placement, rows, ends))
        stages = plan_space.tables.place_stages(placement)
        if plan_space.fits(stages, rows, ends):
            candidates.append(plan_space.lazy_candidate(stages, rows, ends))
        if candidates and control.expired():
            break
    if not candidates:
        raise infeasibility_error(problem, (plan_space.plan(*strategy) for strategy in strategies))
    return best_of(problem, candidates, control, top)


def _draw(
    generator: np.random.Generator, choices: list[tuple[Degrees, tuple[int, ...]]], layers: int
) -> tuple[Placement, int, tuple[int, ...]]:
    degrees, sizes = choices[int(generator.integers(len(choices)))]
    rows = sizes[int(generator.integers(len(sizes)))]
    ordered = megatron_placement(degrees)
    placement = generator.permutation(ordered.reshape(-1)).reshape(ordered.shape)
    cuts = np.sort(generator.choice(np.arange(1, layers), degrees.pipeline - 1, replace=False))
    return placement, rows, (*cuts.tolist(), layers)
