"""What a rank holds of a training's state, and what of it it writes, as boxes of whole tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from trainwright.plan import Sharding
from trainwright_worker.executor.boxes import Box, boxes
from trainwright_worker.executor.iteration import Executor
from trainwright_worker.executor.mesh import RunMesh
from trainwright_worker.executor.unit import Unit, Weight
from trainwright_worker.executor.units import shared_spans

WEIGHTS = "weights"
"""The kind of state that the float32 weights are; the others are the optimizer's, by their names there."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a whole tensor.

    Attributes:
        name: of the whole tensor: kind of state / weight, as in `mean/3.qkv_weight` or `weights/token_embedding`.
        shape: of the whole tensor.
        values: this rank's values in the box, a view in the box's shape.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor


@dataclass(frozen=True, slots=True)
class _Holding:
    """A unit on this rank.

    Attributes:
        states: this rank's part of each kind of state, as flat as the unit's `master`.
        run: the run whose tensor degree divides the unit's weights.
        replica, tensor: this rank's place in that run.
    """

    unit: Unit
    states: dict[str, Tensor]
    run: RunMesh
    replica: int
    tensor: int

    def pieces(self, low: int, high: int, most: int = sys.maxsize) -> Iterator[Piece]:
        """Values `low … high - 1` of the flat unit, as far as they lie here, in boxes of at most so many values."""
        unit, start = self.unit, 0
        low, high = max(low, unit.low), min(high, unit.high)
        for weight in unit.weights:
            size = weight.parameter.numel()
            place = max(low, start)
            for box in boxes(tuple(weight.parameter.shape), place - start, min(high - start, size), most):
                for kind, flat in self.states.items():
                    values = flat[place - unit.low : place - unit.low + box.values].view(box.sizes)
                    yield self._piece(kind, weight, box, values)
                place += box.values
            start += size

    def _piece(self, kind: str, weight: Weight, box: Box, values: Tensor) -> Piece:
        shape, name = list(weight.parameter.shape), f"{kind}/{weight.name}"
        if weight.split is None:
            return Piece(name, tuple(shape), box, values)
        box = box.moved(weight.split, self.tensor * shape[weight.split])
        shape[weight.split] *= self.run.tensor
        return Piece(name, tuple(shape), box, values)

    def shares(self) -> tuple[tuple[int, int], ...]:
        """The intervals of the unit that fall to this rank where the ranks of its run share its writing out evenly.

        Each replica writes what it keeps, or an equal share where all keep everything. What a tensor degree does not
        divide is shared out among the ranks of a tensor group, too, since all of them hold it.
        """
        unit = self.unit
        low, high, edge = unit.low, min(unit.high, unit.size), unit.split_size
        count, number = (1, 0) if unit.replicas.sharding is not Sharding.NONE else (self.run.data, self.replica)
        whole = count * self.run.tensor, number * self.run.tensor + self.tensor
        return _share(low, min(high, edge), count, number), _share(max(low, edge), high, *whole)


def _share(low: int, high: int, count: int, number: int) -> tuple[int, int]:
    """The share with that number of `count` nearly equal ones."""
    size = -(-max(high - low, 0) // count)
    return low + number * size, min(low + (number + 1) * size, high)


def held(executor: Executor) -> Iterator[Piece]:
    """All of the state that this rank holds."""
    for holding in _holdings(executor):
        yield from holding.pieces(0, holding.unit.size)


def written(executor: Executor, most: int) -> Iterator[Piece]:
    """What this rank writes, in pieces of at most so many values: over all ranks each value of the state once.

    The first pipeline writes, and of a weight that several layers hold the run with the first of them there.
    """
    if executor.place.pipeline > 0:
        return
    first_runs = {shared.name: shared.holders[0] for shared in shared_spans(executor.mesh, executor.model)}
    for holding in _holdings(executor):
        first = first_runs.get(holding.unit.weights[0].name, holding.run)
        if executor.rank in first.ranks:
            for low, high in holding.shares():
                yield from holding.pieces(low, high, most)


def _holdings(executor: Executor) -> Iterator[_Holding]:
    stage, optimizer = executor.stage, executor.optimizer
    for unit, states in zip(stage.units, optimizer.states, strict=True):
        run = next(layer.run for layer in stage.layers if any(held.unit is unit for held in layer.held))
        place = run.position(executor.rank)
        named = dict(zip(optimizer.state_names, states, strict=True))
        yield _Holding(unit, {WEIGHTS: unit.master, **named}, run, place.replica, place.tensor)
