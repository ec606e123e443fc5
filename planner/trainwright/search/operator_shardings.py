"""Document of the operator shardings that Alpa's intra-operator pass chose."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.document_kind import document
from trainwright.plan import LayerRun
from trainwright.strategy import RankOrder, Sharding, Strategy


@dataclass(frozen=True, slots=True)
class OperatorSpecs:
    """Sharding of one operator on the mesh.

    A spec names the mesh dimensions that split each axis of a tensor: `R` none, `S0`, `S1` or `S01` (paper Table 1),
    for example `S0 R S1`.

    Attributes:
        algorithm: the loops that mesh dimensions split, for example `batch→0 out→1` (paper Table 3); `replicated`.
        operands: specs of its inputs, in order.
        weight: spec in which its weight is used; None if it has none.
        weight_held: form of the weight between uses: `whole` (as used), or `gathered` (sharded over the replicas, too,
            and all-gathered before every use).
        update_sharded: its all-reduce of gradients became a reduce-scatter and an all-gather (paper §4.2), so that
            replicas share the optimizer's state and work.
        sum_scattered: the all-reduce of its output was rewritten likewise: the operators after it work on shards.
    """

    name: str
    algorithm: str
    output: str
    operands: tuple[str, ...]
    weight: str | None = None
    weight_held: str = "whole"
    update_sharded: bool = False
    sum_scattered: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpecs:
    """Operators of one layer, in order; `layer` is its index in the model."""

    layer: int
    kind: str
    operators: tuple[OperatorSpecs, ...]


@dataclass(frozen=True, slots=True)
class NearestDegrees:
    """Nearest equivalent of consecutive layers' specs in the plan document.

    Attributes:
        exact: it says the same as the operators' specs.
    """

    first: int
    count: int
    tensor: int
    data: int
    order: RankOrder
    sharding: Sharding
    exact: bool

    @property
    def end(self) -> int:
        """Index after the last layer."""
        return self.first + self.count

    def layer_run(self, rows: int) -> LayerRun:
        """Return the run for a micro-batch of `rows`. Raises ValueError if the replicas cannot share them evenly."""
        if rows % self.data:
            raise ValueError(f"{rows} rows cannot be shared evenly by {self.data} replicas")
        parts = (rows // self.data,) * self.data
        return LayerRun(self.first, self.count, Strategy(self.tensor, self.data, self.order, self.sharding), parts)


@document("SpanSpecs")
@dataclass(frozen=True, slots=True)
class SpanSpecs:
    """Operator shardings of consecutive layers on one mesh."""

    mesh_shape: tuple[int, int]
    rows: int
    layers: tuple[LayerSpecs, ...]
    degrees: tuple[NearestDegrees, ...]

    @property
    def exact(self) -> bool:
        """True if the plan document's degrees say all of it."""
        return all(run.exact for run in self.degrees)
