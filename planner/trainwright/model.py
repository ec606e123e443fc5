"""Model: a family's list of layers, each of a kind, in a number format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from trainwright.document_kind import document
from trainwright.families import Custom, Family
from trainwright.layer import Attention, Dtype, LayerKind
from trainwright.strategy import Strategy


@document("Model")
@dataclass(frozen=True)
class Model:
    """List of layers, each of a kind; `Model.of` makes it, and `family` lets a worker build the same layers."""

    family: Family
    dtype: Dtype
    kinds: tuple[LayerKind, ...]
    layers: tuple[str, ...]
    max_tensor_degree: int

    @classmethod
    def of(cls, family: Family, dtype: Dtype = Dtype.FLOAT32, attention: Attention = Attention.FUSED) -> Model:
        stack = family.stack(attention)
        return cls(family, dtype, stack.kinds, stack.layers, stack.max_tensor_degree)

    @cached_property
    def _kinds(self) -> dict[str, LayerKind]:
        return {kind.name: kind for kind in self.kinds}

    def kind(self, name: str) -> LayerKind:
        return self._kinds[name]

    def kind_of(self, layer: int) -> LayerKind:
        """Return a layer's kind by the layer's index."""
        return self._kinds[self.layers[layer]]

    @cached_property
    def _divided_kinds(self) -> dict[str, LayerKind]:
        stack = self.family.stack(Attention.FUSED)
        whole = {kind.name: kind for kind in stack.kinds}
        return {kind.name: kind for kind in stack.divided if self._kinds.get(kind.name) == whole[kind.name]}

    def divided_kind(self, kind: LayerKind) -> LayerKind | None:
        """Return a kind with a vocabulary as a tensor group computes it that divides the vocabulary; None for others.

        Kinds in documents are those of one rank, so that workers that divide no vocabulary know them, too.
        """
        return self._divided_kinds.get(kind.name)

    @cached_property
    def _sequences(self) -> Mapping[str, tuple[int, ...]]:
        return self.family.stack(Attention.FUSED).sequences

    def allows_sequence_parallel(self, kind: LayerKind, tensor: int) -> bool:
        """Return whether a tensor group can divide the activations of a kind along the sequence.

        That holds for kinds that are tensor parallel, or have a divided vocabulary.
        """
        lengths = self._sequences.get(kind.name, ())
        return tensor > 1 and bool(lengths) and not any(length % tensor for length in lengths)

    def divides_sequence(self, kind: LayerKind, strategy: Strategy) -> bool:
        """Return whether a tensor group divides the activations of a kind along the sequence under a strategy."""
        return strategy.sequence_parallel and self.allows_sequence_parallel(kind, strategy.tensor)

    def favours_sequence_parallel(self, tensor: int) -> bool:
        """Return whether all tensor-parallel layers allow it, so that sequences are gathered at the ends of stages alone."""
        kinds = [kind for kind in self.kinds if kind.is_tensor_parallel]
        return bool(kinds) and all(self.allows_sequence_parallel(kind, tensor) for kind in kinds)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Layers that a tensor degree splits: transformer blocks, in all families; empty for convolutions."""
        return tuple(layer for layer in range(len(self.layers)) if self.kind_of(layer).is_tensor_parallel)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Layers with a weight that layers of other kinds may share."""
        return tuple(layer for layer in range(len(self.layers)) if self.kind_of(layer).shared_weight is not None)

    @property
    def parameters(self) -> int:
        """Parameters of the full model, with a tied weight counted once."""
        total = sum(self.kind_of(layer).parameters for layer in range(len(self.layers)))
        owners: dict[str, list[int]] = {}
        for layer in range(len(self.layers)):
            kind = self.kind_of(layer)
            if kind.shared_weight is not None:
                owners.setdefault(kind.shared_weight, []).append(kind.shared_parameters)
        return total - sum(sum(sizes) - max(sizes) for sizes in owners.values())

    @property
    def float32_fields(self) -> tuple[str, ...]:
        """Fields of the rows that stay float32 in half formats."""
        return self.family.keep_float32 if isinstance(self.family, Custom) else ()

    def output_bytes_per_row(self, layer: int) -> int:
        """Return bytes of the boundary after a layer, per row."""
        kind = self.kind_of(layer)
        in_float32 = kind.output_float32_elements_per_row
        in_format = (kind.output_elements_per_row - in_float32) * self.dtype.num_bytes
        return in_format + in_float32 * Dtype.FLOAT32.num_bytes + kind.output_bytes_per_row


def least_rows(model: Model, global_batch_size: int) -> int:
    """Return the rows that one replica computes at once at least; the whole batch means one replica and micro-batch."""
    if not isinstance(model.family, Custom):
        return 1
    return global_batch_size if model.family.whole_batch else model.family.min_rows


def least_rows_words(model: Model, global_batch_size: int) -> str:
    """Return why `least_rows` are needed, for a refusal."""
    if isinstance(model.family, Custom) and model.family.whole_batch:
        return f"custom.whole_batch asks one replica to compute all {global_batch_size} rows of a batch at once"
    return f"custom.min_rows asks every replica to compute {least_rows(model, global_batch_size)} rows or more at once"
