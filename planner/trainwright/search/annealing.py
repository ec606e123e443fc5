"""AMP's Algorithm 2: simulated annealing over degrees, micro-batch sizes and domino placements (§6.3, Fig. 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwright.plan import divisors
from trainwright.search.candidates import best_of
from trainwright.search.degrees import Degrees, micro_batch_sizes
from trainwright.search.problem import Candidate, Problem, SearchControl
from trainwright.search.uniform.placed_stages import PlacedStages, Placement, megatron_placement
from trainwright.search.uniform.plan_space import UniformPlanSpace, check_profiled, infeasibility_error, open_degrees

_STEPS_PER_DOMINO = 16
"""Steps per domino of the search for a tiling, before Megatron's placement is used instead."""

Domino = tuple[int, int, int, int]
"""First row, first column, rows, columns."""


def domino_placement(nodes: NDArray[np.intp], degrees: Degrees, generator: np.random.Generator) -> Placement:
    """Return a random placement: the mesh of nodes × slots, tiled with one domino per stage.

    A domino is any rectangle of tmp × dp devices. Nodes may have different numbers of devices, so rows of the mesh differ in
    length. Stages follow the dominoes' first cells; within a domino tensor ranks run along rows first. Megatron's placement
    is the fallback if no tiling is found.

    Args:
        nodes: `[device]` index of the device's node; a node's devices are adjacent.
        degrees: their product is the number of devices.
        generator: source of the draws.
    """
    _, widths = np.unique(np.cumsum(np.diff(nodes, prepend=nodes[0]) != 0), return_counts=True)
    dominoes = tiling(widths.tolist(), degrees.data * degrees.tensor, generator)
    if dominoes is None:
        return megatron_placement(degrees)
    numbers = np.zeros((len(widths), int(widths.max())), dtype=np.intp)
    numbers[np.arange(numbers.shape[1]) < widths[:, None]] = np.arange(len(nodes))
    members = [
        numbers[row : row + height, column : column + width].reshape(-1) for row, column, height, width in dominoes
    ]
    return np.stack(members).reshape(degrees.pipeline, degrees.data, degrees.tensor)


def tiling(widths: Sequence[int], size: int, generator: np.random.Generator) -> list[Domino] | None:
    """Return dominoes of `size` cells that cover rows of these widths, in the order of their first cells; None if not found.

    The first free cell takes a domino of a random shape that fits; if none does, the search backtracks.
    """
    free = np.arange(max(widths)) < np.array(widths)[:, None]
    shapes = [
        (rows, size // rows) for rows in divisors(size) if rows <= free.shape[0] and size // rows <= free.shape[1]
    ]
    count = sum(widths) // size
    dominoes: list[Domino] = []
    untried = [_shuffled(shapes, generator)]
    for _ in range(_STEPS_PER_DOMINO * count + 1):
        if len(dominoes) == count:
            return dominoes
        row, column = divmod(int(np.argmax(free)), free.shape[1])
        while untried[-1]:
            height, width = untried[-1].pop()
            cells = free[row : row + height, column : column + width]
            if cells.shape == (height, width) and cells.all():
                cells[:] = False
                dominoes.append((row, column, height, width))
                untried.append(_shuffled(shapes, generator))
                break
        else:
            untried.pop()
            if not dominoes:
                return None
            row, column, height, width = dominoes.pop()
            free[row : row + height, column : column + width] = True
    return None


def _shuffled(shapes: list[tuple[int, int]], generator: np.random.Generator) -> list[tuple[int, int]]:
    return [shapes[int(number)] for number in generator.permutation(len(shapes))]


ITERATIONS = 300
LAST_TEMPERATURE = 0.01
"""Final temperature; the initial one is 1, in units of the start's cost, so that the walk is scale-free."""
MAX_EVALUATED = 48
"""Number of accepted strategies, best by Eq. 4, that are evaluated exactly ("run top predicted")."""


def amp_annealing(problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
    """Return AMP's candidates (Algorithm 2), best first by the exact replay.

    A neighbour keeps dp and draws tmp, or keeps tmp and draws dp, with probability ½ each. Then it draws a micro-batch size
    and a placement, and gets the optimum of Eq. 5 on these stages; Eq. 4 is its cost. Strategies that do not fit into memory
    are rejected. The start is the first feasible strategy in Megatron's order: ascending tensor × pipeline degree, then
    micro-batch size. The temperature falls geometrically.

    Corrections of the printed algorithm: it accepts if `randn() < acc_prob` and branches on `randn() > 0.5`, while draws here
    are uniform, so that probabilities of ½ and acc_prob are what they say; it calls pipe_ast(s), while here layers are
    assigned to the neighbour; it indents lines 12–20 under `else`, while here they follow both branches; and here the
    accepted neighbour becomes the current strategy.

    Raises NoFeasiblePlan, with the plan closest to fitting, if no start is feasible.
    """
    check_profiled(problem)
    walk = _Walk(problem, control)
    current = walk.start()
    if current is None:
        raise infeasibility_error(problem, walk.plan_space.plans_ignoring_memory())
    scale = current.seconds
    accepted = {current}
    for iteration in range(ITERATIONS):
        neighbour = walk.neighbour(current)
        if neighbour is not None:
            temperature = scale * LAST_TEMPERATURE ** (iteration / ITERATIONS)
            if walk.generator.random() < math.exp(min(current.seconds - neighbour.seconds, 0.0) / temperature):
                current = neighbour
                accepted.add(current)
        control.report_progress(iteration + 1, ITERATIONS + MAX_EVALUATED)
        if control.expired():
            break
    best = sorted(accepted, key=lambda strategy: (strategy.seconds, strategy.number))[:MAX_EVALUATED]
    drafts = [walk.plan_space.lazy_candidate(strategy.stages, strategy.rows, strategy.ends) for strategy in best]
    return best_of(problem, drafts, control, top, steps_before=ITERATIONS)


@dataclass(frozen=True, eq=False)
class _Strategy:
    """State of the walk; `number` counts states in the order of their visit, `seconds` is the cost by Eq. 4."""

    number: int
    degrees: Degrees
    stages: PlacedStages
    rows: int
    ends: tuple[int, ...]
    seconds: float


class _Walk:
    def __init__(self, problem: Problem, control: SearchControl) -> None:
        self.plan_space = UniformPlanSpace.of(problem)
        self.generator = np.random.default_rng(control.seed)
        self.strategies: dict[tuple[bytes, Degrees, int], _Strategy | None] = {}
        self.sizes_by_degrees = {
            degrees: sizes
            for degrees in open_degrees(problem)
            if (sizes := micro_batch_sizes(problem.global_batch_size, degrees.data))
        }

    def start(self) -> _Strategy | None:
        """Return the first feasible strategy in Megatron's order."""
        for degrees in sorted(self.sizes_by_degrees, key=lambda degrees: (degrees.tensor * degrees.pipeline, degrees)):
            for rows in self.sizes_by_degrees[degrees]:
                strategy = self._strategy(degrees, rows, megatron_placement(degrees))
                if strategy is not None:
                    return strategy
        return None

    def neighbour(self, current: _Strategy) -> _Strategy | None:
        """Return a random neighbour; None if it does not fit into memory."""
        if self.generator.random() > 0.5:
            reachable = [degrees for degrees in self.sizes_by_degrees if degrees.data == current.degrees.data]
        else:
            reachable = [degrees for degrees in self.sizes_by_degrees if degrees.tensor == current.degrees.tensor]
        degrees = reachable[int(self.generator.integers(len(reachable)))]
        rows = self.sizes_by_degrees[degrees][int(self.generator.integers(len(self.sizes_by_degrees[degrees])))]
        placement = domino_placement(self.plan_space.order.node_numbers, degrees, self.generator)
        return self._strategy(degrees, rows, placement)

    def _strategy(self, degrees: Degrees, rows: int, placement: Placement) -> _Strategy | None:
        key = placement.tobytes(), degrees, rows
        if key not in self.strategies:
            self.strategies[key] = self._assign_layers(degrees, rows, placement)
        return self.strategies[key]

    def _assign_layers(self, degrees: Degrees, rows: int, placement: Placement) -> _Strategy | None:
        stages = self.plan_space.tables.place_stages(placement)
        ends = self.plan_space.best_assignment(stages, rows)
        if ends is None:
            return None
        return _Strategy(
            len(self.strategies), degrees, stages, rows, ends, self.plan_space.amp_seconds(stages, rows, ends)
        )
