"""Wiring of a layer: its operators as loop nests, and the sources of their operands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from trainwright.families import HEAD, T5, Family, Gpt, Llama, Moe, Swin, WideResnet
from trainwright.families.operators import POSITION_BIASES
from trainwright.families.t5 import DECODER, DECODER_EMBEDDING
from trainwright.layer import LayerKind, Operator, OperatorKind
from trainwright.loop_nests.operations import FamilyShapes, Operation, build_operation
from trainwright.model import Model
from trainwright.operator_shardings import Loop

Source = int
"""Index of the operator whose output is read; BOUNDARY and ENCODER_OUTPUT are tensors that enter the layer."""

BOUNDARY: Final[Source] = -1
ENCODER_OUTPUT: Final[Source] = -2


@dataclass(frozen=True)
class LayerWiring:
    """Operators of a layer kind in order, with the sources of their operands.

    Attributes:
        operand_sources: per operator, the source of each operand.
        inputs: number of tensors that enter the layer.
        outputs: sources of the tensors that leave it.
    """

    operations: tuple[Operation, ...]
    operand_sources: tuple[tuple[Source, ...], ...]
    inputs: int
    outputs: tuple[Source, ...]


def wire_layer(model: Model, kind: LayerKind) -> LayerWiring:
    """Return the operators of a kind of layers of a model, and what each reads.

    Operators form a chain except for residuals, attention's operands, expert routing, branches of Wide-ResNet and BERT,
    and what T5's decoder reads from the encoder. A table of score biases is used as attention is sharded, so it follows
    attention; nothing reads it. No tensor enters the first layer.
    """
    return _Wiring(kind, model.family, family_shapes(model, kind), is_first=kind.name == model.layers[0]).run()


def family_shapes(model: Model, kind: LayerKind) -> FamilyShapes:
    """Return the shapes of a kind of layers of a model."""
    family = model.family
    heads = family.heads_of(kind.name) if isinstance(family, Swin) else getattr(family, "heads", None)
    parts = getattr(family, "key_value_heads", None) or heads
    experts = family.experts if isinstance(family, Moe) else 0
    patch_size = getattr(family, "patch_size", 0)
    if not isinstance(heads, int) or not isinstance(parts, int):
        has_pixels = isinstance(family, WideResnet)
        return FamilyShapes(model.max_tensor_degree, None, experts, patch_size, has_pixels)
    has_rotary = isinstance(family, Llama | Moe) or (isinstance(family, Gpt) and family.rotary_size is not None)
    return FamilyShapes(parts, heads, experts, patch_size, has_rotary=has_rotary)


@dataclass
class _Wiring:
    kind: LayerKind
    family: Family
    shapes: FamilyShapes
    is_first: bool
    current: Source = BOUNDARY
    entry: Source = BOUNDARY
    sources_by_name: dict[str, Source] = field(
        default_factory=lambda: {"boundary": BOUNDARY, "encoder": ENCODER_OUTPUT}
    )
    operations: list[Operation] = field(default_factory=list)
    operand_sources: list[tuple[Source, ...]] = field(default_factory=list)

    def run(self) -> LayerWiring:
        for segment in self.kind.segments:
            self.entry = self.current
            for operator in segment.operators:
                self._add(operator)
        return LayerWiring(tuple(self.operations), tuple(self.operand_sources), self._inputs(), self._outputs())

    def _inputs(self) -> int:
        if self.is_first:
            return 0
        return 2 if isinstance(self.family, T5) and self.kind.name in {DECODER, HEAD} else 1

    def _outputs(self) -> tuple[Source, ...]:
        if isinstance(self.family, T5) and self.kind.name == DECODER:
            return self.current, ENCODER_OUTPUT
        if isinstance(self.family, T5) and self.kind.name == DECODER_EMBEDDING:
            return self.current, self.sources_by_name.get(
                "encoder_dropout", self.sources_by_name["encoder_normalisation"]
            )
        return (self.current,)

    def _add(self, operator: Operator) -> None:
        operation = self._limited(build_operation(operator, self.shapes, accumulates=self._accumulates(operator)))
        sources = self._sources(operator, len(operation.operands))
        if self.is_first and BOUNDARY in sources:  # raw data has no gradient and needs no resharding
            kept = [number for number, source in enumerate(sources) if source != BOUNDARY]
            operation = replace(operation, operands=tuple(operation.operands[number] for number in kept))
            sources = tuple(sources[number] for number in kept)
        self.operations.append(operation)
        self.operand_sources.append(sources)
        self.sources_by_name[operator.name] = len(self.operations) - 1
        if operator.name != POSITION_BIASES:  # which writes nothing: attention adds the biases to its scores
            self.current = self.sources_by_name[operator.name]
        if operator.name == "scores":
            self.sources_by_name["keys"] = sources[1]

    def _limited(self, operation: Operation) -> Operation:
        """Return an operation with the loops that this layer can shard.

        Attention within windows needs whole windows, and so all positions. Latents become many positions, whose width is sharded.
        """
        if operation.name in _OF_WINDOWS and not _WINDOWS.isdisjoint(self.sources_by_name):
            return replace(operation, loops=tuple(pair for pair in operation.loops if pair[0] is not Loop.SEQUENCE))
        if operation.name == "latent":
            positions = max(operator.positions_per_row for operator in self.kind.operators)
            sizes = [(loop, size // positions if loop is Loop.OUT else size) for loop, size in operation.loops]
            return replace(operation, loops=tuple(sizes))
        return operation

    def _accumulates(self, operator: Operator) -> bool:
        """Return whether the operator adds to another branch: residuals, and all embeddings except the first of a stack."""
        if operator.kind is OperatorKind.EMBEDDING:
            return bool(self.operations) and operator.name != "decoder_tokens"
        ends_block = self._is_convolutional and operator.name == "activation"
        return ends_block or operator.name.endswith("_residual")

    def _sources(self, operator: Operator, operands: int) -> tuple[Source, ...]:
        """Return the operator's sources: the previous operator unless its name implies others."""
        if operands == 0:
            return ()
        names = {"current": self.current, "entry": self.entry, **self.sources_by_name}
        return tuple(names[label] for label in self._labels(operator.name) or ("current",) * operands)

    def _labels(self, name: str) -> tuple[str, ...]:
        parallel = self._labels_of_parallel_block.get(name)
        if parallel is not None or name.endswith("_residual"):
            return parallel or ("current", "entry")
        if name == POSITION_BIASES:
            return ("context" if "context" in self.sources_by_name else "attention",)
        if name == "activation" and self._is_convolutional:
            around = "projection_normalisation"
            return "expand_normalisation", around if around in self.sources_by_name else "boundary"
        if name == "projection" and self._is_convolutional:
            return ("boundary",)
        return _READ.get(name, ())

    @property
    def _labels_of_parallel_block(self) -> dict[str, tuple[str, ...]]:
        """Return what the feed-forward of a parallel block reads, and what its residual adds to."""
        if not isinstance(self.family, Gpt) or not self.family.parallel_residual:
            return {}
        first, read = "feed_forward_normalisation", "entry"
        if self.family.shared_norm:
            first, read = "feed_forward_in", "attention_normalisation"
        return {first: (read,), "feed_forward_residual": ("current", "attention_residual")}

    @property
    def _is_convolutional(self) -> bool:
        """Return whether the layer is a Wide-ResNet block."""
        return isinstance(self.family, WideResnet) and self.kind.name != HEAD


_WINDOWS: Final = frozenset({"windows", "into_windows"})
_OF_WINDOWS: Final = frozenset({"attention", "scores", "context"})
"""Operators that work on one window at a time, where there are windows."""

_READ: Final[dict[str, tuple[str, ...]]] = {
    "cross_key_value": ("encoder",),
    "cross_attention": ("cross_query", "current"),
    "cross_scores": ("cross_query", "current"),
    "cross_context": ("current", "cross_key_value"),
    "context": ("current", "keys"),
    "dispatch": ("feed_forward_normalisation", "current"),
    "combination": ("current", "choice"),
    "pooler": ("boundary",),
}
"""Sources by operator name; values have the same source as the keys of the scores."""
