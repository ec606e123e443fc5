"""The layers of a model as a search sees them: classes of equal layers, and every range of layers by what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.setting import Setting
from trainwright.layer import LayerKind
from trainwright.model import Model

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class LayerClass:
    """Layers that cost the same wherever they stand in a stage.

    Attributes:
        input_bytes_per_row: of the boundary that enters the layer; 0 for the model's first.
        output_bytes_per_row: of the boundary that leaves it for another stage; 0 for the model's last.
        holds_shared_weight: False where an earlier layer of the stage holds the weight that this one shares.
    """

    kind: LayerKind
    input_bytes_per_row: int
    output_bytes_per_row: int
    holds_shared_weight: bool

    def parameters_at(self, tensor: int, setting: Setting) -> int:
        """Values that one rank holds at that tensor degree."""
        held = setting.values_at(self.kind, tensor)
        return held if self.holds_shared_weight else held - setting.shared_at(self.kind, tensor)

    @property
    def is_last(self) -> bool:
        return self.output_bytes_per_row == 0


@dataclass(frozen=True)
class Level:
    """The ranges of one length: for each, the range one layer shorter that it extends, and the class of its last layer.

    Attributes:
        nodes, parents, classes: numbers; `parents` are places in the level before.
    """

    nodes: Indices
    parents: Indices
    classes: Indices


@dataclass
class Sequence:
    """Every range `first … end - 1` of a model's layers; ranges that hold the same classes in the same order are one.

    Attributes:
        classes: the layer classes.
        levels: distinct ranges by length.
        node: [first, end] number of the range; -1 where it is empty.
    """

    classes: tuple[LayerClass, ...]
    levels: tuple[Level, ...]
    node: Indices
    _members: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(len(level.nodes) for level in self.levels)

    @property
    def layers(self) -> int:
        return len(self.node) - 1

    def members(self, first: int, end: int) -> tuple[int, ...]:
        """Classes of a range's layers, in order."""
        return self._members[first, end]


def sequence_of(model: Model) -> Sequence:
    """The ranges of a model."""
    layers = len(model.layers)
    classes: dict[tuple[str, int, int, bool], int] = {}
    found: list[LayerClass] = []
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
                classes[key] = len(found)
                found.append(LayerClass(kind, entering, leaving, holds))
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
    return Sequence(tuple(found), tuple(_level(level) for level in levels), node, members)


def _level(entries: list[tuple[int, int, int]]) -> Level:
    columns = np.array(entries, dtype=np.int64).reshape(-1, 3)
    return Level(columns[:, 0], columns[:, 1], columns[:, 2])
