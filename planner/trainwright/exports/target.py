"""Target of an export: a trainer or a launcher, in one version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from trainwright.cluster import Device
from trainwright.exports.capabilities import Capabilities
from trainwright.exports.uniform_shape import UniformShape, ranks, shape_of
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.runtime import Runtime
from trainwright.training import Optimizer

ALIGNED_ENTRIES = 8
"""Multiple that a vocabulary needs, so that rows of half-precision logits begin at multiples of 16 bytes."""


@dataclass(frozen=True)
class ExportRequest:
    """Plan to write for a target that supports it.

    Attributes:
        model: what is trained; None if it was not given.
        remarks: sentences for the head of the first file: where the plan is from, what was lost, what it costs.
        dtype_reason: why the model is in its number format.
        runtime: of the prediction; None without one.
    """

    plan: Plan
    model: Model | None = None
    optimizer: Optimizer = "adam"
    remarks: tuple[str, ...] = ()
    dtype_reason: str = "number format of the plan"
    runtime: Runtime | None = None

    @property
    def dtype(self) -> Dtype | None:
        """Number format to train in: the model's, else that which the plan states; None where neither is known."""
        return self.plan.dtype if self.model is None else self.model.dtype

    @property
    def remarks_with_vocabulary(self) -> tuple[str, ...]:
        """Return the remarks, with one on a vocabulary that makes products slow in a trainer that does not pad it."""
        entries = getattr(self.model.family, "vocabulary_size", 0) if self.model is not None else 0
        if self.model is None or self.model.dtype is Dtype.FLOAT32 or entries % ALIGNED_ENTRIES == 0:
            return self.remarks
        padded = -(-entries // ALIGNED_ENTRIES) * ALIGNED_ENTRIES
        return (
            *self.remarks,
            (
                f"A vocabulary of {entries:,} is no multiple of {ALIGNED_ENTRIES}, so products with it are slow in {self.model.dtype} "
                f"(an eighth to a third of the rate on an H200): train with {padded:,}."
            ),
        )

    @property
    def overlaps_gradients(self) -> bool | None:
        """Return whether the prediction reduces gradients during the last backward; None without a prediction."""
        return None if self.runtime is None else self.runtime.overlaps_gradients

    @property
    def shape(self) -> UniformShape:
        """Shape of the plan, which every target but a mere launcher needs."""
        shape = shape_of(self.plan)
        assert shape is not None, "the nearest plan of a trainer is uniform"
        return shape

    @property
    def ranks(self) -> tuple[Device, ...]:
        return ranks(self.plan)


@dataclass(frozen=True, slots=True)
class ExportFile:
    """File of an export."""

    name: str
    text: str


class Target(Protocol):
    """Trainer or launcher that a plan is exported to.

    Attributes:
        software: its name and the version whose options the files use.
        remark: what a user has to know of any plan there.
        preset: name of the runtime preset by which its exports are priced; None: our worker's runtime.
    """

    software: str
    capabilities: Capabilities
    remark: str
    preset: str | None

    def files(self, request: ExportRequest) -> tuple[ExportFile, ...]: ...


def comment(sentences: Iterable[str], width: int = 116) -> str:
    """Return sentences as lines of a comment."""
    lines = []
    for sentence in sentences:
        line = "#"
        for word in sentence.split():
            if len(line) + 1 + len(word) > width:
                lines.append(line)
                line = "#  "
            line += f" {word}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def explained(lines: Iterable[tuple[str, str]], indent: str = "    ") -> str:
    """Return lines of code, each with its reason as a comment, aligned."""
    pairs = [*lines]
    width = min(max(len(code) for code, _ in pairs), 60)
    return "".join(f"{indent}{code:<{width}}  # {why}\n" if why else f"{indent}{code}\n" for code, why in pairs)


def counted(number: int, noun: str, ending: str = "s") -> str:
    """Format a number with its noun."""
    return f"{number} {noun}{ending if number != 1 else ''}"
