"""Shardings of the operators of a stage, as Alpa's intra-operator pass chooses them; part of the plan document."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby, pairwise, product
from typing import Annotated, Final

from trainwright.bounds import OMITTED_ONE
from trainwright.document_kind import document


class Loop(StrEnum):
    """Dimensions that operators loop over."""

    BATCH = "batch"
    SEQUENCE = "sequence"
    HEADS = "heads"
    IN = "in"
    OUT = "out"
    WIDTH = "width"
    ENTRIES = "entries"
    EXPERT = "expert"


LoopMapping = tuple[Loop | None, Loop | None]
"""Loops that mesh dimensions 0 and 1 shard; None: the devices along it compute the same."""


class WeightHeld(StrEnum):
    """Form of a weight between its uses: as used, or sharded over the replicas too and all-gathered before every use."""

    WHOLE = "whole"
    GATHERED = "gathered"


REPLICATED: Final = "replicated"
"""Algorithm of an operator that no mesh dimension shards."""


def format_algorithm(mapping: LoopMapping) -> str:
    """Format the loops with the mesh dimensions that shard each: `batch→0 out→1`."""
    loops = dict.fromkeys(loop for loop in mapping if loop is not None)
    words = (f"{loop}→{''.join(str(d) for d in (0, 1) if mapping[d] is loop)}" for loop in loops)
    return " ".join(words) or REPLICATED


def parse_algorithm(algorithm: str) -> LoopMapping:
    """Return the loop that each mesh dimension shards. Raise ValueError for anything that `format_algorithm` does not write."""
    mapping = _MAPPINGS.get(algorithm)
    if mapping is None:
        raise ValueError(
            f"expected loops with the mesh dimensions that shard them, as in 'batch→0 out→1', or {REPLICATED!r}, got {algorithm!r}"
        )
    return mapping


_MAPPINGS: Final[dict[str, LoopMapping]] = {
    format_algorithm(mapping): mapping for mapping in product((None, *Loop), repeat=2)
}


def parse_spec(spec: str) -> tuple[tuple[int, ...], ...]:
    """Return `[axis]` the mesh dimensions that shard it. Raise ValueError for anything but words `R`, `S0`, `S1` and `S01`."""
    axes = tuple(_AXES.get(word) for word in spec.split())
    if None in axes:
        raise ValueError(f"expected R, S0, S1 or S01 for each axis, as in 'S0 R S1', got {spec!r}")
    return tuple(axis for axis in axes if axis is not None)


_AXES: Final[dict[str, tuple[int, ...]]] = {"R": (), "S0": (0,), "S1": (1,), "S01": (0, 1)}


def _check(where: str, parse: Callable[[str], object], text: str) -> None:
    """Raise ValueError that says where a text is which does not parse."""
    try:
        parse(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


@dataclass(frozen=True, slots=True)
class OperatorSpecs:
    """Sharding of one operator on the mesh.

    A spec names the mesh dimensions that split each axis of a tensor: `R` none, `S0`, `S1` or `S01` (paper Table 1),
    for example `S0 R S1`.

    Attributes:
        algorithm: the loops that mesh dimensions split, for example `batch→0 out→1` (paper Table 3); `replicated`.
        operands: specs of its inputs, in order.
        weight: spec in which its weight is used; None if it has none.
        update_sharded: its all-reduce of gradients became a reduce-scatter and an all-gather (paper §4.2), so that
            replicas share the optimizer's state and work.
        sum_scattered: the all-reduce of its output was rewritten likewise: the operators after it work on shards.
    """

    name: str
    algorithm: str
    output: str
    operands: tuple[str, ...]
    weight: str | None = None
    weight_held: WeightHeld = WeightHeld.WHOLE
    update_sharded: bool = False
    sum_scattered: bool = False

    def __post_init__(self) -> None:
        specs = {"output": self.output, "weight": self.weight or ""}
        specs |= {f"operands[{number}]": spec for number, spec in enumerate(self.operands)}
        _check(f"operator {self.name}: algorithm", parse_algorithm, self.algorithm)
        for field, spec in specs.items():
            _check(f"operator {self.name}: {field}", parse_spec, spec)

    @property
    def mapping(self) -> LoopMapping:
        """Loop that each mesh dimension shards."""
        return parse_algorithm(self.algorithm)


@dataclass(frozen=True, slots=True)
class LayerSpecs:
    """Operators of consecutive layers of one kind with equal shardings.

    Attributes:
        layer: index of the first one in the model.
        operators: of one layer, in order.
        count: number of layers.
    """

    layer: int
    kind: str
    operators: tuple[OperatorSpecs, ...]
    count: Annotated[int, OMITTED_ONE] = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"layer {self.layer}: count: expected at least 1, got {self.count}")

    @property
    def end(self) -> int:
        """Index after the last layer."""
        return self.layer + self.count

    @property
    def where(self) -> str:
        """Name of the layers in messages: `layer 3`, `layers 3…5`."""
        return f"layer {self.layer}" if self.count == 1 else f"layers {self.layer}…{self.end - 1}"


@document("SpanSpecs")
@dataclass(frozen=True, slots=True)
class SpanSpecs:
    """Operator shardings of consecutive layers on one mesh.

    The stage of a plan that holds them has the layers' nearest degrees, and its pipeline the rows of a micro-batch.

    Attributes:
        mesh_shape: devices along each dimension; device i has the coordinates (i // n_1, i % n_1).
        layers: in order; neighbours of one kind with equal operators become one entry, so that equal shardings are equal specs.
    """

    mesh_shape: tuple[int, int]
    layers: tuple[LayerSpecs, ...]

    def __post_init__(self) -> None:
        if min(self.mesh_shape) < 1:
            raise ValueError(f"mesh_shape: expected at least one device in each dimension, got {list(self.mesh_shape)}")
        for before, after in pairwise(self.layers):
            if after.layer != before.end:
                raise ValueError(f"layers: layer {before.end} must follow, got {after.layer}")
        object.__setattr__(self, "layers", _merge_equal(self.layers))

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.mesh_shape)

    @property
    def first(self) -> int:
        """First layer; 0 where there is none."""
        return self.layers[0].layer if self.layers else 0

    @property
    def end(self) -> int:
        """Index after the last layer."""
        return self.layers[-1].end if self.layers else 0

    def each_layer(self) -> Iterator[tuple[int, LayerSpecs]]:
        """Yield the index of every layer with its operators."""
        for specs in self.layers:
            for layer in range(specs.layer, specs.end):
                yield layer, specs

    def operators(self) -> Iterator[tuple[LayerSpecs, OperatorSpecs]]:
        """Yield every operator with the layers that share it."""
        for layer in self.layers:
            for operator in layer.operators:
                yield layer, operator

    def parts(self, operator: OperatorSpecs, loop: Loop) -> int:
        """Return into how many parts the mesh divides a loop of an operator."""
        return math.prod(
            size for size, sharded in zip(self.mesh_shape, operator.mapping, strict=True) if sharded is loop
        )


def _merge_equal(layers: Iterable[LayerSpecs]) -> tuple[LayerSpecs, ...]:
    """Merge neighbours of one kind with equal operators."""
    groups = groupby(layers, key=lambda each: (each.kind, each.operators))
    return tuple(replace(first, count=sum(each.count for each in (first, *others))) for _, (first, *others) in groups)
