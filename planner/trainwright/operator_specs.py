"""What the intra-operator pass decided, operator by operator, as a document for export."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.plan import LayerRun, Order, Sharding


@dataclass(frozen=True, slots=True)
class OperatorSpecs:
    """How one operator runs on the mesh.

    Specs name what divides each axis of a tensor, axis by axis: `R` nothing, `S0`, `S1` or `S01` the mesh's dimensions
    (paper Table 1), for example `S0 R S1`.

    Attributes:
        algorithm: the loops that mesh dimensions divide, for example `batch→0 out→1` (paper Table 3); `replicated`.
        operands: specs of what it reads, in order.
        weight: spec in which its weight is used; None where it has none.
        weight_held: how the weight is kept between uses: `whole` (as used), or `gathered` (divided over the replicas
            too, and gathered before every use).
        update_sharded: whether its all-reduce of gradients became a reduce-scatter and an all-gather (paper §4.2), so
            that replicas share the optimizer's state and work.
        sum_scattered: whether the sum of its output was rewritten likewise: what follows it works on parts.
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
    """The operators of one layer, in order; `layer` is its index in the model."""

    layer: int
    kind: str
    operators: tuple[OperatorSpecs, ...]


@dataclass(frozen=True, slots=True)
class Degrees:
    """The nearest that the plan document can say of consecutive layers.

    Attributes:
        exact: whether it says the same as the operators' specs.
    """

    first: int
    count: int
    tensor: int
    data: int
    order: Order
    sharding: Sharding
    exact: bool

    @property
    def end(self) -> int:
        """Index behind the last of the layers."""
        return self.first + self.count

    def layer_run(self, rows: int) -> LayerRun:
        """The run for a micro-batch of so many rows, which the replicas share evenly; raises ValueError if they cannot."""
        if rows % self.data:
            raise ValueError(f"{rows} rows cannot be shared evenly by {self.data} replicas")
        parts = (rows // self.data,) * self.data
        return LayerRun(self.first, self.count, self.tensor, self.data, parts, self.order, self.sharding)


@dataclass(frozen=True, slots=True)
class SpanSpecs:
    """How consecutive layers run on a mesh of that shape."""

    mesh_shape: tuple[int, int]
    rows: int
    layers: tuple[LayerSpecs, ...]
    degrees: tuple[Degrees, ...]

    @property
    def exact(self) -> bool:
        """Whether the plan document's degrees say all of it."""
        return all(run.exact for run in self.degrees)
