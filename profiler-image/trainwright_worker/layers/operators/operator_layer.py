"""Layer of a GPT-2 or a Llama whose operators are sharded each in its own way over a mesh (Alpa, Zheng et al. 2022, §4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainwright.families import EMBEDDING, HEAD
from trainwright.operator_shardings import LayerSpecs
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output
from trainwright_worker.layers.operators.layouts import EVERYWHERE, Layout, without_sums
from trainwright_worker.layers.operators.operator_tensors import POSITIONS, ROWS, Value
from trainwright_worker.layers.operators.resharding import Mesh, reshard
from trainwright_worker.layers.operators.sharded_operators import ShardedOperators


@dataclass(frozen=True, slots=True)
class StageEnd:
    """Layout in which a boundary passes between stages, on the mesh of the operators or on one of data and tensor degree."""

    mesh: Mesh
    layout: Layout


class OperatorLayer(Layer):
    """Layer that converts each operator's operands to the layouts of its spec, and computes it on this rank's parts.

    Parameters are this rank's parts; `whole` is the same layer, unsharded.

    Attributes:
        entering: layout of the boundary that enters: the one in which the layer before leaves it.
        leaving: layout in which its own boundary leaves, unless it ends the stage.
        first_end, last_end: set for the first layer of a stage, which converts the boundary, and for the last one.
    """

    first_end: StageEnd | None = None
    last_end: StageEnd | None = None

    def __init__(self, whole: Layer, specs: LayerSpecs, mesh: Mesh, entering: Layout = EVERYWHERE) -> None:
        super().__init__()
        self.reads = whole.reads  # type: ignore[misc] # those of the layer that it stands for
        self.shared_weights = whole.shared_weights  # type: ignore[misc] # likewise
        self.kind, self.entering = specs.kind, entering
        self.operators = ShardedOperators(self, whole, specs, mesh)
        self.leaving = without_sums(self.operators.output_layout(specs.operators[-1].name))

    def checkpoint_name(self, layer: int, attribute: str) -> str:
        return self.operators.whole.checkpoint_name(layer, attribute)

    def torch_names(self, layer: int, attribute: str) -> tuple[str, ...]:
        return self.operators.whole.torch_names(layer, attribute)

    def whole_shape(self, attribute: str) -> torch.Size:
        """Return the shape of a weight, unsharded."""
        return self.operators.whole.get_parameter(attribute).shape

    @property
    def counts_loss(self) -> bool:
        """Return whether this rank's loss counts: along dimensions that shard no rows or positions all ranks have the same."""
        if self.kind != HEAD:
            return False
        placements = zip(self.operators.operand_layout("cross_entropy"), self.operators.mesh.coordinates, strict=True)
        return all(placement in {ROWS, POSITIONS} or coordinate == 0 for placement, coordinate in placements)

    def forward(self, boundary: Boundary, data: Data) -> Output:
        """Compute the layer; `data` holds all rows of the micro-batch."""
        operators, entered = self.operators, self._entered(boundary)
        if self.kind == HEAD:
            return Output((), operators.loss(entered, data["targets"]))
        value = operators.embed(data["tokens"]) if self.kind == EMBEDDING else operators.block(entered)
        return Output(self._left(value))

    def _entered(self, boundary: Boundary) -> Value:
        end = self.first_end
        if end is None:
            return Value(boundary, self.entering)
        if end.mesh is self.operators.mesh:
            return Value(boundary, end.layout)
        return Value(reshard(end.mesh, boundary, end.layout, EVERYWHERE), EVERYWHERE)

    def _left(self, value: Value) -> Boundary:
        end, mesh = self.last_end, self.operators.mesh
        if end is None:
            return reshard(mesh, value.tensors, value.layout, self.leaving)
        if end.mesh is mesh:
            return reshard(mesh, value.tensors, value.layout, end.layout)
        return reshard(end.mesh, reshard(mesh, value.tensors, value.layout, EVERYWHERE), EVERYWHERE, end.layout)
