"""Layers and boundaries that a tensor group divides along the sequence, and the bytes that a rank keeps of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import layer_values
from trainwright.layer import LayerKind, TensorSplit, least_sequence_parallel_seconds_ratio
from trainwright.model import Model
from trainwright.plan import LayerRun
from trainwright.rank_layout import divides_boundary
from trainwright.runtime import Runtime
from trainwright.strategy import Strategy


class SeriesEnds(NamedTuple):
    """Ends of series of sequence-parallel layers within a layer run, where the tensor group gathers a boundary.

    Attributes:
        begins, ends: whether the run's first layer is one of them, and its last.
        gathered_row_bytes: boundaries after a series that other layers of the run follow.
        gathered_gradient_row_bytes: boundaries before a series, whose gradients are gathered for other layers of the run.
    """

    begins: bool
    ends: bool
    gathered_row_bytes: tuple[int, ...] = ()
    gathered_gradient_row_bytes: tuple[int, ...] = ()


NO_SERIES = SeriesEnds(begins=False, ends=False)


class DividedSides(NamedTuple):
    """Sides of a stage whose boundary stays divided along the sequence."""

    before: bool
    after: bool


WHOLE_SIDES = DividedSides(before=False, after=False)


@dataclass(frozen=True)
class DividedActivations:
    """Sequence parallelism of a model's layers, with caches that all plans share.

    Attributes:
        row_bytes: `[cut]` bytes of one row over the boundary before a layer.
        is_tensor_sharded: returns whether a tensor group of this degree splits a kind's computation.
    """

    model: Model
    runtime: Runtime
    row_bytes: tuple[int, ...]
    is_tensor_sharded: Callable[[LayerKind, int], bool]
    _splits: dict[tuple[str, int, bool], TensorSplit] = field(default_factory=dict, repr=False, compare=False)
    _chosen: dict[int, bool] = field(default_factory=dict, repr=False, compare=False)
    _input_row_bytes: dict[int, tuple[float, ...]] = field(default_factory=dict, repr=False, compare=False)
    _series_ends: dict[tuple[int, int, int], SeriesEnds] = field(default_factory=dict, repr=False, compare=False)

    def split(self, kind: LayerKind, strategy: Strategy) -> TensorSplit:
        """Return how tensor groups divide a layer of this kind under a strategy."""
        return self._split(kind, strategy.tensor, asks=strategy.sequence_parallel)

    def as_chosen(self, strategy: Strategy) -> Strategy:
        """Return the strategy as searches make it; itself where it is so."""
        chosen = self.chosen_at(strategy.tensor)
        return strategy if strategy.sequence_parallel == chosen else strategy.replace(sequence_parallel=chosen)

    def chosen_split(self, kind: LayerKind, tensor: int) -> TensorSplit:
        """Return how tensor groups divide a layer of this kind in the plans that searches make."""
        return self._split(kind, tensor, asks=self.chosen_at(tensor))

    def _split(self, kind: LayerKind, tensor: int, *, asks: bool) -> TensorSplit:
        key = (kind.name, tensor, asks)
        tensor_split = self._splits.get(key)
        if tensor_split is None:
            tensor_split = self._splits[key] = TensorSplit(tensor, divides_sequence=asks and self._allows(kind, tensor))
        return tensor_split

    def _allows(self, kind: LayerKind, tensor: int) -> bool:
        return self.is_tensor_sharded(kind, tensor) and self.model.allows_sequence_parallel(kind, tensor)

    def chosen_at(self, tensor: int) -> bool:
        """Return whether layer runs of this tensor degree are sequence parallel in the plans that searches make.

        Profiles of embedding and head at degree 1 alone are those of workers that know no sequence parallelism.
        """
        if tensor not in self._chosen:
            self._chosen[tensor] = (
                self.runtime.sequence_parallel
                and self.model.favours_sequence_parallel(tensor)
                and all(
                    self.is_tensor_sharded(kind, tensor) for kind in self.model.kinds if self.model.divided_kind(kind)
                )
            )
        return self._chosen[tensor]

    def divides_boundary(self, before: LayerRun, behind: LayerRun) -> bool:
        """Return whether a boundary between stages stays divided (`rank_layout.divides_boundary`)."""
        return divides_boundary(self.model, before, behind) and all(
            self.split(self.model.kind_of(layer), run.strategy).divides_sequence
            for run, layer in ((before, before.end - 1), (behind, behind.first))
        )

    def chosen_divided_cuts(self, tensor: int) -> NDArray[np.bool_]:
        """Return `[cut]` whether the boundary before a layer stays divided in the plans that searches make."""
        divides = _chosen_layers(self, tensor)
        return np.array([False, *(before and behind for before, behind in pairwise(divides)), False])

    def chosen_message_row_bytes(self, tensor: int) -> NDArray[np.float64]:
        """Return `[cut]` bytes of one row of a message there in the plans that searches make, at one tensor degree."""
        whole: NDArray[np.float64] = np.array(self.row_bytes, dtype=np.float64)
        return whole / np.where(self.chosen_divided_cuts(tensor), tensor, 1)

    def input_row_bytes(self, strategy: Strategy) -> tuple[float, ...]:
        """Return `[layer]` bytes of one row of its input that a rank keeps for recompute."""
        return self._kept_row_bytes(strategy.tensor, divides=strategy.sequence_parallel)

    def _kept_row_bytes(self, tensor: int, *, divides: bool) -> tuple[float, ...]:
        key = tensor if divides else 1
        if key not in self._input_row_bytes:
            parts = {kind.name: key if key > 1 and self._allows(kind, key) else 1 for kind in self.model.kinds}
            pairs = zip(self.row_bytes, map(self.model.kind, self.model.layers), strict=False)
            value_bytes = self.model.dtype.num_bytes
            self._input_row_bytes[key] = tuple(
                0.0
                if kind.without_backward
                else max(size - value_bytes * kind.passed_elements_per_row, 0.0) / parts[kind.name]
                for size, kind in pairs
            )
        return self._input_row_bytes[key]

    def chosen_recomputed_bytes(self, tensor: int, rows: int) -> NDArray[np.float64]:
        """Return `[layer]` bytes of inputs and buffers that a rank keeps for recompute in the plans that searches make."""
        inputs = np.array(self._kept_row_bytes(tensor, divides=self.chosen_at(tensor)), dtype=np.float64)
        snapshots = layer_values(self.model, lambda kind: kind.snapshot_bytes)
        kept: NDArray[np.float64] = rows * inputs + snapshots
        return kept

    def gathered_output_row_bytes(self, last: LayerRun, *, stays_divided: bool) -> float:
        """Return the bytes of a rank's slice of one row of a stage's output; 0 unless it is saved and sent whole."""
        split = self.split(self.model.kind_of(last.end - 1), last.strategy)
        if last.strategy.recompute or stays_divided or not split.divides_sequence:
            return 0.0
        return self.row_bytes[last.end] / split.degree

    def chosen_gathered_output_row_bytes(self, tensor: int) -> NDArray[np.float64]:
        """Return `[cut]` these bytes in the plans that searches make, without recompute, at one tensor degree."""
        is_gathered = np.array([False, *_chosen_layers(self, tensor)]) & ~self.chosen_divided_cuts(tensor)
        return np.where(is_gathered, np.array(self.row_bytes) / tensor, 0.0)

    def series_ends(self, run: LayerRun) -> SeriesEnds:
        """Return the ends of series of sequence-parallel layers within a run."""
        if not run.strategy.sequence_parallel or run.strategy.tensor == 1:
            return NO_SERIES
        key = (run.first, run.end, run.strategy.tensor)
        if key not in self._series_ends:
            divided = [
                self._allows(self.model.kind_of(layer), run.strategy.tensor) for layer in range(run.first, run.end)
            ]
            changes = [run.first + place for place in range(1, len(divided)) if divided[place - 1] != divided[place]]
            self._series_ends[key] = SeriesEnds(
                divided[0],
                divided[-1],
                tuple(self.row_bytes[cut] for cut in changes if not divided[cut - run.first]),
                tuple(self.row_bytes[cut] for cut in changes if divided[cut - run.first]),
            )
        return self._series_ends[key]


def boundary_row_bytes(whole_bytes: int, strategy: Strategy, *, is_divided: bool) -> float:
    """Return the bytes of one row that a rank has of a boundary between stages."""
    return whole_bytes / (strategy.tensor if is_divided else 1)


def _chosen_layers(activations: DividedActivations, tensor: int) -> list[bool]:
    layers = activations.model.layers
    return [activations.chosen_split(activations.model.kind(name), tensor).divides_sequence for name in layers]


def least_seconds_ratio(model: Model, kind: LayerKind, tensor: int, max_rows: int, computed: LayerKind) -> float:
    """Return the least that dividing the sequence leaves of the compute of a kind's layer, as a tensor group computes it."""
    if not model.allows_sequence_parallel(kind, tensor):
        return 1.0
    return least_sequence_parallel_seconds_ratio(computed, tensor, max_rows, model.dtype)
