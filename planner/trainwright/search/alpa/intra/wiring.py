"""Which outputs every operator of a layer reads: the edges of the operator graph, family by family."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from trainwright.families import HEAD, T5, Family, Moe, WideResnet
from trainwright.families.t5 import DECODER, DECODER_EMBEDDING
from trainwright.layer import LayerKind, Operator, OperatorKind
from trainwright.search.alpa.intra.catalogue import Shapes, operation
from trainwright.search.alpa.intra.operation import Operation

Source = int
"""Index of the operator whose output is read; BOUNDARY and ENCODER_OUTPUT are tensors that enter the layer."""

BOUNDARY: Final[Source] = -1
ENCODER_OUTPUT: Final[Source] = -2


@dataclass(frozen=True)
class WiredLayer:
    """The operators of a layer kind in order, and who reads whom.

    Attributes:
        reads: of every operator, the source of every operand.
        inputs: how many tensors enter the layer.
        outputs: the sources of the tensors that leave it.
    """

    operations: tuple[Operation, ...]
    reads: tuple[tuple[Source, ...], ...]
    inputs: int
    outputs: tuple[Source, ...]


def wired(kind: LayerKind, family: Family, max_tensor_degree: int, *, is_first: bool) -> WiredLayer:
    """The operator graph of a layer kind, in the words of its family.

    Operators form a chain but for residuals, attention's operands, a mixture's routing, Wide-ResNet's and BERT's
    branches and what T5's decoder reads of the encoder. `is_first` says that no layer stands before it.
    """
    return _Wiring(kind, family, _shapes(family, max_tensor_degree), is_first).run()


def _shapes(family: Family, max_tensor_degree: int) -> Shapes:
    """Where heads differ by stage, what divides them all says how far attention is divided."""
    heads = getattr(family, "heads", None)
    parts = getattr(family, "key_value_heads", None) or heads
    experts = family.experts if isinstance(family, Moe) else 0
    if not isinstance(heads, int) or not isinstance(parts, int):
        return Shapes(max_tensor_degree, experts=experts)
    return Shapes(parts, heads, experts)


@dataclass
class _Wiring:
    kind: LayerKind
    family: Family
    shapes: Shapes
    is_first: bool
    current: Source = BOUNDARY
    entry: Source = BOUNDARY
    seen: dict[str, Source] = field(default_factory=lambda: {"boundary": BOUNDARY, "encoder": ENCODER_OUTPUT})
    operations: list[Operation] = field(default_factory=list)
    reads: list[tuple[Source, ...]] = field(default_factory=list)

    def run(self) -> WiredLayer:
        for segment in self.kind.segments:
            self.entry = self.current
            for operator in segment.operators:
                self._add(operator)
        return WiredLayer(tuple(self.operations), tuple(self.reads), self._inputs(), self._outputs())

    def _inputs(self) -> int:
        if self.is_first:
            return 0
        return 2 if isinstance(self.family, T5) and self.kind.name in {DECODER, HEAD} else 1

    def _outputs(self) -> tuple[Source, ...]:
        if isinstance(self.family, T5) and self.kind.name == DECODER:
            return self.current, ENCODER_OUTPUT
        if isinstance(self.family, T5) and self.kind.name == DECODER_EMBEDDING:
            return self.current, self.seen.get("encoder_dropout", self.seen["encoder_normalisation"])
        return (self.current,)

    def _add(self, operator: Operator) -> None:
        found = operation(operator, self.shapes, adds=self._adds(operator))
        sources = self._sources(operator, len(found.operands))
        if self.is_first and BOUNDARY in sources:  # raw data has no gradient, and every device can read what it wants
            kept = [number for number, source in enumerate(sources) if source != BOUNDARY]
            found = replace(found, operands=tuple(found.operands[number] for number in kept))
            sources = tuple(sources[number] for number in kept)
        self.operations.append(found)
        self.reads.append(sources)
        self.current = self.seen[operator.name] = len(self.operations) - 1
        if operator.name == "scores":
            self.seen["keys"] = sources[1]

    def _adds(self, operator: Operator) -> bool:
        """Whether the operator adds to what another branch made: residuals, and all look-ups but those that begin."""
        if operator.kind is OperatorKind.EMBEDDING:
            return bool(self.operations) and operator.name != "decoder_tokens"
        ends_block = self._is_convolutional and operator.name == "activation"
        return ends_block or operator.name.endswith("_residual")

    def _sources(self, operator: Operator, operands: int) -> tuple[Source, ...]:
        """What the operator reads: what the layer made last, unless its name says otherwise."""
        if operands == 0:
            return ()
        names = {"current": self.current, "entry": self.entry, **self.seen}
        return tuple(names[label] for label in self._labels(operator.name) or ("current",) * operands)

    def _labels(self, name: str) -> tuple[str, ...]:
        if name.endswith("_residual"):
            return "current", "entry"
        if name in {"attention", "scores"} and self.current == self.seen.get("cross_key_value"):
            return "cross_query", "current"
        if name == "activation" and self._is_convolutional:
            around = "projection_normalisation"
            return "expand_normalisation", around if around in self.seen else "boundary"
        if name == "projection" and self._is_convolutional:
            return ("boundary",)
        return _READ.get(name, ())

    @property
    def _is_convolutional(self) -> bool:
        """Whether it is one of Wide-ResNet's blocks."""
        return isinstance(self.family, WideResnet) and self.kind.name != HEAD


_READ: Final[dict[str, tuple[str, ...]]] = {
    "cross_key_value": ("encoder",),
    "context": ("current", "keys"),
    "dispatch": ("feed_forward_normalisation", "current"),
    "combination": ("current", "choice"),
    "pooler": ("boundary",),
}
"""By operator: what it reads. Values come from where the keys of the scores came from."""
