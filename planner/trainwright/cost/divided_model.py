"""Model as a tensor group divides it: the layers that a rank computes, and the parameters resident on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from trainwright.cost.layer_sums import Array, span_sums
from trainwright.layer import LayerKind
from trainwright.model import Model

Counts = TypeVar("Counts", int, Array)


@dataclass(frozen=True, eq=False)
class DividedModel:
    """Layers of a model on one rank of a tensor group, with caches that all plans share.

    Attributes:
        degree: of the tensor group.
        is_sharded: returns whether the group splits a kind's computation and parameters over its ranks.
        kind_counts: returns the layers `first … end - 1` of each kind.
        prefix_sums: `[cut]` layers before each cut, by kind.
    """

    model: Model
    degree: int
    is_sharded: Callable[[LayerKind], bool]
    kind_counts: Callable[[int, int], list[tuple[LayerKind, int]]]
    prefix_sums: Sequence[tuple[LayerKind, list[int]]]
    _parameters: dict[str, int] = field(default_factory=dict, repr=False)

    def kind(self, kind: LayerKind) -> LayerKind:
        """Return a kind as the group computes it: with a divided vocabulary if the runtime divides it."""
        if self.degree == 1 or not self.is_sharded(kind):
            return kind
        return self.model.divided_kind(kind) or kind

    def divides_vocabulary(self, kind: LayerKind) -> bool:
        """Return whether the group divides a kind that is replicated where the vocabulary is not divided."""
        return self.degree > 1 and not kind.is_tensor_parallel and self.is_sharded(kind)

    def parameters(self, kind: LayerKind) -> int:
        """Return the parameters of one layer."""
        if kind.name not in self._parameters:
            computed = self.kind(kind)
            is_whole = not computed.is_tensor_parallel and self.is_sharded(kind)
            self._parameters[kind.name] = (
                kind.parameters // self.degree if is_whole else computed.parameters_at(self.degree)
            )
        return self._parameters[kind.name]

    def tied_parameters(self, kind: LayerKind) -> int:
        """Return the parameters of the kind's tied weight."""
        return kind.shared_parameters // (self.degree if self.is_sharded(kind) else 1)

    def trained_parameters(self, kind: LayerKind) -> int:
        """Return the parameters of one layer that are trained; no group divides a layer with others."""
        return self.parameters(kind) - kind.frozen_parameters

    def untied_parameters(self, kind: LayerKind) -> int:
        """Return the parameters of one layer without its tied weight."""
        return self.parameters(kind) - (self.tied_parameters(kind) if kind.shared_weight is not None else 0)

    @cached_property
    def parameters_by_kind(self) -> Array:
        """`[kind]` parameters of one layer."""
        return np.array([self.parameters(kind) for kind in self.model.kinds], dtype=np.float64)

    @cached_property
    def trained_by_kind(self) -> Array:
        """`[kind]` parameters of one layer that are trained."""
        return np.array([self.trained_parameters(kind) for kind in self.model.kinds], dtype=np.float64)

    def resident_parameters(self, first: int, end: int) -> int:
        """Return the trained parameters of the layers `first … end - 1`; a tied weight counts once."""
        return self._resident(0, self.kind_counts(first, end))

    def frozen_parameters(self, first: int, end: int) -> int:
        """Return the parameters of the layers `first … end - 1` that are not trained."""
        return sum(count * kind.frozen_parameters for kind, count in self.kind_counts(first, end))

    @cached_property
    def resident_values(self) -> Array:
        """`[first, end]` resident trained parameters of all spans of layers."""
        counts = self._span_counts
        return self._resident(np.zeros_like(counts[0][1]), counts)

    @cached_property
    def frozen_values(self) -> Array:
        """`[first, end]` parameters of all spans of layers that are not trained."""
        total = np.zeros_like(self._span_counts[0][1])
        for kind, count in self._span_counts:
            if kind.frozen_parameters:
                total = total + count * kind.frozen_parameters
        return total

    @cached_property
    def _span_counts(self) -> list[tuple[LayerKind, Array]]:
        return [(kind, np.maximum(span_sums(np.array(sums, dtype=np.float64)), 0.0)) for kind, sums in self.prefix_sums]

    def _resident(self, total: Counts, counts: Iterable[tuple[LayerKind, Counts]]) -> Counts:
        """Add the parameters of `counts` layers of each kind to `total`; a tied weight counts with its first kind alone."""
        owned: dict[str, Any] = {}
        for kind, count in counts:
            total = total + count * (self.untied_parameters(kind) - kind.frozen_parameters)
            if kind.shared_weight is not None:
                was_owned = owned.get(kind.shared_weight, False)
                owned[kind.shared_weight] = is_owned = (count > 0) | was_owned
                total = total + (is_owned > was_owned) * self.tied_parameters(kind)
        return total
