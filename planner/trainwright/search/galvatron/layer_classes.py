"""Classes of equal layers, and the strategies of Galvatron's decision trees (§III-B)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import permutations
from math import prod

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.divided_model import DividedModel
from trainwright.layer import LayerKind
from trainwright.model import Model
from trainwright.strategy import RankOrder, Sharding, Strategy

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class LayerClass:
    """Layers with equal costs at any position in a stage.

    Attributes:
        input_bytes_per_row: tensor that enters the layer; 0 for the model's first.
        output_bytes_per_row: tensor that leaves it for another stage; 0 for the model's last.
        holds_shared_weight: False where an earlier layer of the stage already stores the weight that this one shares.
    """

    kind: LayerKind
    input_bytes_per_row: int
    output_bytes_per_row: int
    holds_shared_weight: bool

    def parameters_of(self, divided: DividedModel) -> int:
        """Return the parameters that a rank has of a layer."""
        return (divided.parameters if self.holds_shared_weight else divided.untied_parameters)(self.kind)

    @property
    def is_last(self) -> bool:
        return self.output_bytes_per_row == 0


@dataclass(frozen=True)
class RunLengthLevel:
    """Distinct ranges of one length, each extending a range one layer shorter by a last layer.

    Attributes:
        ranges: range numbers.
        parents: indices of the shorter ranges in the previous level.
        classes: classes of the last layers.
    """

    ranges: Indices
    parents: Indices
    classes: Indices


@dataclass
class LayerSequence:
    """Distinct ranges `first … end - 1` of a model's layers; ranges with equal classes in equal order share a number.

    Attributes:
        levels: distinct ranges by length.
        range_number: `[first, end]` number of the range; -1 if it is empty.
    """

    classes: tuple[LayerClass, ...]
    levels: tuple[RunLengthLevel, ...]
    range_number: Indices
    _members: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(len(level.ranges) for level in self.levels)

    @property
    def layers(self) -> int:
        return len(self.range_number) - 1

    def range_classes(self, first: int, end: int) -> tuple[int, ...]:
        """Return the classes of a range's layers, in order."""
        return self._members[first, end]


def layer_sequence(model: Model) -> LayerSequence:
    """Return the model's distinct layer ranges, numbered."""
    layers = len(model.layers)
    classes: dict[tuple[str, int, int, bool], int] = {}
    layer_classes: list[LayerClass] = []
    node = np.full((layers + 1, layers + 1), -1, dtype=np.int64)
    children: dict[tuple[int, int], int] = {}
    levels: list[list[tuple[int, int, int]]] = [[] for _ in range(layers)]
    place: dict[int, int] = {-1: 0}
    members: dict[tuple[int, int], tuple[int, ...]] = {}
    for first in range(layers):
        seen: set[str] = set()
        at = -1
        path: tuple[int, ...] = ()
        for layer in range(first, layers):
            kind = model.kind_of(layer)
            entering = model.output_bytes_per_row(layer - 1) if layer else 0
            leaving = model.output_bytes_per_row(layer) if layer < layers - 1 else 0
            holds = kind.shared_weight is None or kind.shared_weight not in seen
            seen |= {kind.shared_weight} if kind.shared_weight is not None else set()
            key = (kind.name, entering, leaving, holds)
            if key not in classes:
                classes[key] = len(layer_classes)
                layer_classes.append(LayerClass(kind, entering, leaving, holds))
            number = classes[key]
            if (at, number) not in children:
                fresh = len(children)
                children[at, number] = fresh
                level = levels[layer - first]
                place[fresh] = len(level)
                level.append((fresh, place[at], number))
            at = children[at, number]
            path = (*path, number)
            node[first, layer + 1] = at
            members[first, layer + 1] = path
    return LayerSequence(tuple(layer_classes), tuple(_level(level) for level in levels), node, members)


def _level(entries: list[tuple[int, int, int]]) -> RunLengthLevel:
    columns = np.array(entries, dtype=np.int64).reshape(-1, 3)
    return RunLengthLevel(columns[:, 0], columns[:, 1], columns[:, 2])


class Paradigm(StrEnum):
    """Parallelism that splits the devices at one level of a decision tree."""

    DATA = "dp"
    SHARDED = "sdp"
    TENSOR = "tp"


TreeLevel = tuple[Paradigm, int]
"""Paradigm and its degree."""


def strategy_of_tree(levels: tuple[TreeLevel, ...], *, recompute: bool = False) -> Strategy:
    """Return the strategy of a decision tree (S_j): levels from the root down, and whether the layer is recomputed (CKPT).

    The last level splits adjacent devices. No paradigm occurs on two levels.
    """
    data_inner = len(levels) > 1 and levels[-1][0] is not Paradigm.TENSOR
    sharded = any(paradigm is Paradigm.SHARDED for paradigm, _ in levels)
    return Strategy(
        prod(degree for paradigm, degree in levels if paradigm is Paradigm.TENSOR),
        prod(degree for paradigm, degree in levels if paradigm is not Paradigm.TENSOR),
        RankOrder.DATA_INNER if data_inner else RankOrder.TENSOR_INNER,
        Sharding.ZERO3 if sharded else Sharding.NONE,
        recompute,
    )


def decision_trees(devices: int, *, mixing_data_and_sharded: bool = False) -> tuple[tuple[TreeLevel, ...], ...]:
    """Return the levels of every decision tree over `devices` devices, not counting recomputation.

    Degrees are any divisors above 1; on powers of two they are the paper's {2, 4, 8, …}. Trees with both DP and SDP,
    which takeaway #3 excludes, are included only on request.
    """
    trees: list[tuple[TreeLevel, ...]] = []
    for height in range(len(Paradigm) + 1):
        for paradigms in permutations(Paradigm, height):
            if not mixing_data_and_sharded and {Paradigm.DATA, Paradigm.SHARDED} <= set(paradigms):
                continue
            trees += [tuple(zip(paradigms, degrees, strict=True)) for degrees in _factors(devices, height)]
    return tuple(trees)


def strategies(devices: int, *, recompute: bool = True, mixing_data_and_sharded: bool = False) -> tuple[Strategy, ...]:
    """Return all strategies of a stage on `devices` devices, those with recomputation after those without."""
    levels = decision_trees(devices, mixing_data_and_sharded=mixing_data_and_sharded)
    choices = (False, True) if recompute else (False,)
    return tuple(strategy_of_tree(tree, recompute=choice) for choice in choices for tree in levels)


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield ordered factorisations of a number into `count` factors above 1."""
    if count == 0:
        if number == 1:
            yield ()
        return
    for factor in range(2, number + 1):
        if number % factor == 0:
            for rest in _factors(number // factor, count - 1):
                yield (factor, *rest)
