"""Layer whose operators are sharded each in its own way over a mesh (Alpa, Zheng et al. 2022, §4)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainwright.families import HEAD
from trainwright.loop_nests.layer_wiring import LayerWiring, Source
from trainwright.operator_shardings import LayerSpecs
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output
from trainwright_worker.layers.operators.layouts import EVERYWHERE, PARTIAL, Layout, without_sums
from trainwright_worker.layers.operators.operator_tensors import OperatorCall, OperatorTensors, Value
from trainwright_worker.layers.operators.resharding import Mesh, Tensors, reshard
from trainwright_worker.layers.operators.sharded_layers import operators_of


@dataclass(frozen=True, slots=True)
class StageEnd:
    """Layout in which a boundary passes between stages, on the mesh of the operators or on one of data and tensor degree."""

    mesh: Mesh
    layout: Layout


class OperatorLayer(Layer):
    """Layer that computes its operators one after the other, as they are wired, each on this rank's parts of its operands.

    Parameters are this rank's parts; `whole` is the same layer, unsharded. All ranks of the mesh compute the same operators in
    the same order.

    Attributes:
        entering: layouts of the tensors that enter: those in which the layer before leaves them, or in the first layer of a
            stage those in which they are first read.
        leaving: layouts in which its own tensors leave, unless it ends the stage.
        first_end, last_end: set for the first layer of a stage, which converts the boundary, and for the last one.
    """

    first_end: StageEnd | None = None
    last_end: StageEnd | None = None

    def __init__(
        self,
        whole: Layer,
        specs: LayerSpecs,
        wiring: LayerWiring,
        mesh: Mesh,
        entering: tuple[Layout, ...] | None = None,
    ) -> None:
        super().__init__()
        self.reads = whole.reads  # type: ignore[misc] # those of the layer that it stands for
        self.shared_weights = whole.shared_weights  # type: ignore[misc] # likewise
        self.mixes_rows = whole.mixes_rows  # type: ignore[misc] # likewise
        self.kind, self.wiring = specs.kind, wiring
        self.operators = OperatorTensors(self, whole, operators_of(whole), wiring, specs, mesh)
        self.entering = tuple(map(self._first_read, range(wiring.inputs))) if entering is None else entering
        self.leaving = tuple(map(self._left_layout, wiring.outputs))
        self._readers = Counter(source for sources in wiring.operand_sources for source in sources)

    def register_weight(self, attribute: str, part: nn.Parameter) -> None:
        """Register this rank's part of a weight by its name in the whole layer, with dots where a module holds it."""
        owner, _, name = attribute.rpartition(".")
        module: nn.Module = self
        for child in filter(None, owner.split(".")):
            if child not in dict(module.named_children()):
                module.add_module(child, nn.Module())
            module = module.get_submodule(child)
        module.register_parameter(name, part)

    def lay_out(self, boundary: Boundary) -> Boundary:
        return self.operators.whole.lay_out(boundary)

    def _first_read(self, number: int) -> Layout:
        """Return the layout in which an operator first reads a tensor that enters."""
        for operation, sources in zip(self.wiring.operations, self.wiring.operand_sources, strict=True):
            if -1 - number in sources:
                return without_sums(self.operators.operand_layout(operation.name, sources.index(-1 - number)))
        return EVERYWHERE

    def _left_layout(self, source: Source) -> Layout:
        if source < 0:
            return self.entering[-1 - source]
        return without_sums(self.operators.output_layout(self.wiring.operations[source].name))

    def checkpoint_name(self, layer: int, attribute: str) -> str:
        return self.operators.whole.checkpoint_name(layer, attribute)

    def torch_names(self, layer: int, attribute: str) -> tuple[str, ...]:
        return self.operators.whole.torch_names(layer, attribute)

    def whole_shape(self, attribute: str) -> torch.Size:
        """Return the shape of a weight, unsharded."""
        return self.operators.whole.get_parameter(attribute).shape

    def forward(self, boundary: Boundary, data: Data) -> Output:
        """Compute the layer; `data` holds all rows of the micro-batch."""
        values = self._entered(boundary)
        loss: Tensor | None = None
        for index, (operation, sources) in enumerate(
            zip(self.wiring.operations, self.wiring.operand_sources, strict=True)
        ):
            operator = self.operators.operators[operation.name]
            operands = tuple(values[source] for source in sources)
            value = operator.compute(OperatorCall(self.operators, operation.name, operands, data))
            if self._readers[index] > 1 and PARTIAL in value.layout:
                value = value.summed(self.operators.mesh)  # once for all that read it
            values[index] = value
            if value.loss is not None:
                loss = value.loss if loss is None else loss + value.loss
        if self.kind == HEAD:
            return Output((), loss)
        return Output(self._left([values[source] for source in self.wiring.outputs]), loss)

    def _entered(self, boundary: Boundary) -> dict[Source, Value]:
        """Return the tensors that enter and are read, by the sources that name them."""
        end, mesh, layouts = self.first_end, self.operators.mesh, self.entering
        if end is not None and end.mesh is mesh:
            layouts = (end.layout,) * len(boundary)
        elif end is not None:
            boundary, layouts = reshard(end.mesh, boundary, end.layout, EVERYWHERE), (EVERYWHERE,) * len(boundary)
        entered = enumerate(zip(boundary, layouts, self.entering, strict=True))
        return {
            -1 - number: Value(reshard(mesh, (tensor,), layout, entering), entering)
            for number, (tensor, layout, entering) in entered
            if -1 - number in self._readers
        }

    def _left(self, values: list[Value]) -> Boundary:
        end, mesh = self.last_end, self.operators.mesh
        if end is None:
            return self._converted(values, self.leaving)
        layout = end.layout if end.mesh is mesh else EVERYWHERE
        left = self._converted(values, (layout,) * len(values))
        return left if end.mesh is mesh else reshard(end.mesh, left, EVERYWHERE, end.layout)

    def _converted(self, values: list[Value], layouts: tuple[Layout, ...]) -> Tensors:
        """Return the tensors that leave, each in its layout."""
        mesh, pairs = self.operators.mesh, zip(values, layouts, strict=True)
        return tuple(tensor for value, layout in pairs for tensor in value.converted(mesh, layout))
