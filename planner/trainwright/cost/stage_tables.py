"""Tables of the stages that a search chooses from: sums over their layers, and bytes on a device, by span of layers.

The terms of one layer, and of one stage, are those of `time_terms` and `memory_terms`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwright.cost import memory
from trainwright.cost.context import CostContext
from trainwright.cost.layer_sums import Array, Spans, prefix_sums
from trainwright.cost.memory_terms import InFlightBytes, boundary_buffer_bytes
from trainwright.layer import WHOLE_LAYER
from trainwright.model import Model


@dataclass(frozen=True, eq=False)
class StageSpans:
    """Spans of layers that a stage may hold: `[span]` are pairs of cuts, first < end, in `np.triu_indices` order.

    Attributes:
        cuts: layers before which stages may start, ascending, and the number of layers.
    """

    model: Model
    cuts: tuple[int, ...]

    @property
    def piece_count(self) -> int:
        """Number of pieces between adjacent cuts."""
        return len(self.cuts) - 1

    @cached_property
    def pairs(self) -> Spans:
        """`[span]` indices into `cuts` of its first layer and of its end."""
        first, end = np.triu_indices(len(self.cuts), 1)
        return first, end

    @cached_property
    def layers(self) -> Spans:
        """`[span]` first layer, and one past the last."""
        cuts = np.array(self.cuts, dtype=np.intp)
        first, end = self.pairs
        return cuts[first], cuts[end]

    @cached_property
    def is_last(self) -> NDArray[np.bool_]:
        """`[span]` whether it ends with the model."""
        is_last: NDArray[np.bool_] = self.pairs[1] == self.piece_count
        return is_last

    @cached_property
    def pieces(self) -> NDArray[np.intp]:
        """`[piece]` indices of the spans between adjacent cuts."""
        first, end = self.pairs
        return np.flatnonzero(end == first + 1)

    def grid(self, by_span: Array, fill: float) -> Array:
        """Return `[…, first, end]` by cuts from `[…, span]`, `fill` where end <= first."""
        table = np.full((*by_span.shape[:-1], len(self.cuts), len(self.cuts)), fill)
        table[..., self.pairs[0], self.pairs[1]] = by_span
        return table

    def sums(self, by_layer: Array, *, without_first: bool = False, without_last: bool = False) -> Array:
        """Return `[…, span]` sums over the layers of each span, or over all but its first or its last."""
        prefix, (first, end) = prefix_sums(by_layer), self.layers
        span_sums: Array = prefix[..., end - without_last] - prefix[..., first + without_first]
        return span_sums

    def largest(self, by_kind: Array) -> Array:
        """Return `[span]` the largest value of a layer, given a value by layer kind."""
        largest: Array = (self._has_kind * by_kind[:, None]).max(axis=0)
        return largest

    def largest_pair(self, by_kind: Array) -> Array:
        """Return `[span]` the largest sum of two adjacent layers, or a single layer's own value."""
        pairs, has_pair = self._kind_pairs
        if not pairs:
            return self.largest(by_kind)
        sizes = by_kind[np.array(pairs)].sum(axis=1)
        largest: Array = np.maximum((has_pair * sizes[:, None]).max(axis=0), self.largest(by_kind))
        return largest

    @cached_property
    def _has_kind(self) -> NDArray[np.bool_]:
        names = np.array(self.model.layers)
        return np.stack([self.sums(names == kind.name) > 0 for kind in self.model.kinds])

    @cached_property
    def _kind_pairs(self) -> tuple[list[tuple[int, int]], NDArray[np.bool_]]:
        """The distinct kinds of adjacent layers, and `[pair, span]` whether such layers are in the span."""
        number = {kind.name: index for index, kind in enumerate(self.model.kinds)}
        by_layer = list(pairwise(number[name] for name in self.model.layers))
        distinct = list(dict.fromkeys(by_layer))
        at_second = [np.array([False, *(pair == kinds for pair in by_layer)]) for kinds in distinct]
        return distinct, np.array([self.sums(marks, without_first=True) > 0 for marks in at_second])


@dataclass(frozen=True, eq=False)
class StageTables:
    """Bytes of stages, `[span]`, in the plans that searches make; cached by tensor degree.

    A boundary counts whole, since the tensor degrees of the neighbours are not known; the exact estimate knows which stay
    divided.
    """

    context: CostContext
    spans: StageSpans
    _resident: dict[int, Array] = field(default_factory=dict)
    _recomputed: dict[tuple[int, int], Array] = field(default_factory=dict)

    def resident_values(self, tensor: int) -> Array:
        """Return `[span]` trained parameters resident on a rank."""
        if tensor not in self._resident:
            self._resident[tensor] = self.context.divided_at(tensor).resident_values[self.spans.layers]
        return self._resident[tensor]

    @cached_property
    def frozen_values(self) -> Array:
        """`[span]` parameters resident on a rank that are not trained; no tensor group divides layers with some."""
        values: Array = self.context.divided_at(1).frozen_values[self.spans.layers]
        return values

    def recomputed_bytes(self, tensor: int, rows: int) -> Array:
        """Return `[span]` bytes that recomputed layers store of a micro-batch."""
        if (tensor, rows) not in self._recomputed:
            by_layer = self.context.divided_activations.chosen_recomputed_bytes(tensor, rows)
            self._recomputed[tensor, rows] = self.spans.sums(by_layer)
        return self._recomputed[tensor, rows]

    @cached_property
    def snapshot_bytes(self) -> Array:
        """`[kind]` bytes of buffers that a recompute sets aside while it has those of its first forward."""
        return np.array([float(kind.snapshot_bytes) for kind in self.context.model.kinds])

    @cached_property
    def row_bytes(self) -> Array:
        """`[cut]` bytes of one row over the boundary there."""
        row_bytes: Array = np.array(self.context.row_bytes, dtype=np.float64)[list(self.spans.cuts)]
        return row_bytes

    @cached_property
    def boundary_row_bytes(self) -> InFlightBytes[Array]:
        """`[span]` bytes of one row in boundary tensors."""
        first, end = self.spans.pairs
        return boundary_buffer_bytes(self.row_bytes[first], self.row_bytes[end])

    def workspace_bytes(self, tensor: int, rows: int) -> Array:
        """Return `[span]` workspace bytes: of the loss, which last stages need, or of a user's layers without recompute.

        Buffers of layers count with them, since nothing divides them either.
        """
        if self.context.counts_layer_workspace:
            return self._layer_workspace_bytes(rows) + self._buffer_bytes
        loss = memory.loss_bytes(self.context, self.context.divided_at(tensor), rows)
        return np.where(self.spans.is_last, float(loss), 0.0)

    def _layer_workspace_bytes(self, rows: int) -> Array:
        """Return `[span]` the most that a layer takes beyond what later layers of the span have freed by then."""
        context, kinds = self.context, self.context.kind_numbers
        accelerators = [accelerator.name for accelerator in context.cluster.accelerators]
        taken = np.array([context.workspace_bytes(kind, rows) for kind in context.model.kinds])[kinds]
        saved = np.array(
            [
                min((context.layer_cost(name, kind, WHOLE_LAYER, rows).activation_bytes for name in names), default=0.0)
                for kind in context.model.kinds
                for names in [[name for name in accelerators if context.profiles.has(name, kind.name, 1)]]
            ]
        )[kinds]
        before = prefix_sums(saved)
        first, end = self.spans.layers
        starts = [np.maximum.accumulate((taken + before[1:])[start:]) for start in range(len(kinds))]
        most = np.array([starts[start][stop - start - 1] for start, stop in zip(first, end, strict=True)])
        return np.maximum(most - before[end], 0.0)

    @cached_property
    def _buffer_bytes(self) -> Array:
        kind_bytes = np.array([float(kind.buffer_bytes) for kind in self.context.model.kinds])
        return self.spans.sums(kind_bytes[self.context.kind_numbers])


def hidden_by_previous(communication: Array, computation: Array) -> Array:
    """Return `[…, layer]` seconds that each layer's communication overlaps the computation of the layer before it."""
    hidden = np.zeros_like(communication)
    hidden[..., 1:] = np.minimum(communication[..., 1:], computation[..., :-1])
    return hidden


def hidden_by_next(communication: Array, computation: Array) -> Array:
    """Return `[…, layer]` seconds that each layer's communication overlaps the computation of the layer after it."""
    return hidden_by_previous(communication[..., ::-1], computation[..., ::-1])[..., ::-1]
