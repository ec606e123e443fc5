"""Models read back: parameters by part, the FLOPs of a token, the bytes of training state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rich.console import Group

from trainwright.cost.memory_terms import ValueBytes
from trainwright.families import Custom, Family, Moe
from trainwright.layer import Dtype, LayerKind, Operator, OperatorKind
from trainwright.model import Model
from trainwright.report.tables import add_row, new_table, titled
from trainwright.throughput import flops_per_row, tokens_per_row
from trainwright.training import Optimizer

_EXPERTS: Final = "experts"
_PARTS: Final = (
    (_EXPERTS, "experts"),
    ("router", "router"),
    ("attention_", "attention"),
    ("cross_", "attention"),
    ("query_key_value", "attention"),
    ("position_biases", "attention"),
    ("feed_forward_", "feed-forward"),
    ("gate_and_up", "feed-forward"),
    ("down", "feed-forward"),
    ("projection", "head"),
    ("pooler", "head"),
    ("next_sentence", "head"),
    ("transform", "head"),
)
"""Part of an operator by the beginning of its name; norms go before, and all others are of the embedding."""


@dataclass(frozen=True, slots=True)
class ModelReading:
    """Figures of a model that a user knows it by.

    Attributes:
        parameters: of the whole model; a tied weight counts once.
        active_parameters: that a token passes through; fewer with experts.
        parts: parameters by part of the model, by kind of layer in a described one; a shared weight where it comes first.
        tokens: of a row, of encoder and decoder together; None where rows have none.
        flops_per_row: of forward and backward.
        state_bytes: of weights, gradients and optimizer state; frozen weights have the first alone.
    """

    parameters: int
    active_parameters: int
    parts: Mapping[str, int]
    tokens: int | None
    flops_per_row: float
    state_bytes: float
    dtype: Dtype
    optimizer: Optimizer

    @classmethod
    def of(cls, model: Model, optimizer: Optimizer) -> ModelReading:
        """Read a model, with gradients in float32 as our worker and most trainers keep them."""
        family, parts, shared = model.family, Counter[str](), set[str]()
        kinds = [model.kind_of(layer) for layer in range(len(model.layers))]
        for kind in kinds:
            for operator in kind.operators:
                parts[_part(operator, kind, family)] += operator.weight_elements
            if kind.shared_weight in shared:
                # A described layer is one operator, of which the weight may be a part.
                again = max(kind.operators, key=lambda operator: operator.weight_elements == kind.shared_parameters)
                parts[_part(again, kind, family)] -= kind.shared_parameters
            elif kind.shared_weight is not None:
                shared.add(kind.shared_weight)
        idle = 0
        if isinstance(family, Moe):
            idle = parts[_EXPERTS] * (family.experts - family.experts_per_token) // family.experts
        frozen = sum(kind.frozen_parameters for kind in kinds)
        per_value = ValueBytes.of(model, optimizer, Dtype.FLOAT32)
        return cls(
            model.parameters,
            model.parameters - idle,
            {part: size for part, size in parts.items() if size},
            tokens_per_row(family),
            flops_per_row(model),
            per_value.unsharded_state(model.parameters - frozen, frozen),
            model.dtype,
            optimizer,
        )

    @property
    def sentence(self) -> str:
        """Return the model in one line."""
        active = f", {_count(self.active_parameters)} active" if self.active_parameters < self.parameters else ""
        work, unit = self.flops_per_row, "row"
        if self.tokens is not None:
            work, unit = work / self.tokens, "token"
        return (
            f"The model: {_count(self.parameters)} parameters{active}; {work / 1e9:,.3g} GFLOP a {unit} forward and backward; "
            f"{self.state_bytes / 2**30:,.1f} GiB of weights, gradients and {self.optimizer} state in {self.dtype}."
        )


def reading_table(reading: ModelReading, title: str) -> Group:
    """Return the parameters by part, and what a row and the state take."""
    table = new_table([("part", "whole"), ("parameters", "right"), ("share", "right")])
    for part, size in sorted(reading.parts.items(), key=lambda item: -item[1]):
        add_row(table, part, f"{size:,}", f"{size / reading.parameters:.1%}")
    add_row(table, "all", f"{reading.parameters:,}", "100.0%")
    if reading.active_parameters < reading.parameters:
        add_row(
            table, "active", f"{reading.active_parameters:,}", f"{reading.active_parameters / reading.parameters:.1%}"
        )
    return titled(title, table, reading.sentence)


def _part(operator: Operator, kind: LayerKind, family: Family) -> str:
    if isinstance(family, Custom):
        return kind.name
    if operator.kind is OperatorKind.NORMALISATION:
        return "norms"
    return next((part for begin, part in _PARTS if operator.name.startswith(begin)), "embedding")


def _count(parameters: int) -> str:
    """Format with three decimals in billions, or in millions below one."""
    return f"{parameters / 1e9:,.3f} billion" if parameters >= 1e9 else f"{parameters / 1e6:,.1f} million"
