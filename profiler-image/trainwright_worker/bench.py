"""One layer kind by itself with an input, ready to be measured: forward, backward and update on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainwright.cluster import Emulation
from trainwright.layer import LayerKind
from trainwright.orders import ProfileOrder
from trainwright_worker.batches import weight_generator
from trainwright_worker.emulation import backward_pieces, forward_pieces
from trainwright_worker.executor.optimizer import Optimizer, make_optimizer
from trainwright_worker.executor.stage import TORCH_DTYPES
from trainwright_worker.executor.unit import Replicas, Unit, Weight
from trainwright_worker.layers.layer import Boundary, Data, FamilyLayers, Layer, Output, on_device
from trainwright_worker.layers.of_model import layers_of
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.memory import peak_bytes


@dataclass(frozen=True)
class Bench:
    """A layer, its weights as the executor holds them, and what it reads.

    Attributes:
        gradients: of the layer's output, as the next layer would hand them back.
    """

    kind: LayerKind
    rows: int
    layer: Layer
    boundary: Boundary
    data: Data
    gradients: Boundary
    optimizer: Optimizer
    device: torch.device
    emulation: Emulation | None
    tensor_degree: int

    @classmethod
    def of(
        cls, order: ProfileOrder, kind: LayerKind, rows: int, device: torch.device, emulation: Emulation | None
    ) -> Bench:
        model, family = order.model, layers_of(order.model)
        number = model.layers.index(kind.name)
        shard = TensorShard(0, order.tensor_degree)
        layer = family.make(number, seed=0, shard=shard, shared={}).to(device)
        dtype = TORCH_DTYPES[model.dtype]
        weights = [Weight(name, parameter) for name, parameter in layer.named_parameters()]
        units = [Unit(weights, Replicas(), dtype=dtype, device=device)] if weights else []
        optimizer = make_optimizer(order.optimizer, units, 1e-4)
        data = family.rows(layer.reads, seed=0, iteration=0, first=0, count=rows) if layer.reads else {}
        data = on_device(data, device, dtype)
        boundary = _boundary(family, number - 1, rows, dtype, device)
        gradients = tuple(value.detach() for value in _boundary(family, number, rows, dtype, device))
        return cls(kind, rows, layer, boundary, data, gradients, optimizer, device, emulation, order.tensor_degree)

    def forward(self) -> Output:
        for unit in self.optimizer.units:
            unit.expect()
        output: Output = self.layer(self.boundary, self.data)
        return output

    def backward(self, output: Output) -> None:
        output.backward(self.gradients)
        for unit in self.optimizer.units:
            unit.collect()

    def sum(self) -> None:
        """There is one replica: its gradients are the sum."""
        for unit in self.optimizer.units:
            unit.take_whole()

    def update(self) -> None:
        self.optimizer.step()
        for unit in self.optimizer.units:
            unit.publish()

    def clear(self) -> None:
        """As before a first micro-batch."""
        for value in self.boundary:
            value.grad = None
        for unit in self.optimizer.units:
            unit.begin()

    def paces(self) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
        """Seconds of forward, backward and update on the emulated device; empty on a real one."""
        if self.emulation is None:
            return (), (), ()
        pieces = forward_pieces(self.emulation, self.kind, rows=self.rows, tensor=self.tensor_degree)
        forward = [piece.seconds for piece in pieces]
        backward = [piece.seconds for piece in backward_pieces(pieces)]
        values = sum(parameter.numel() for parameter in self.layer.parameters())
        return [sum(forward)], [sum(backward)], [self.emulation.update_seconds(values)]

    @property
    def activation_bytes(self) -> int:
        """What a forward keeps for its backward, the input included."""
        return activation_bytes(self.forward, self.layer, (*self.boundary, *self.data.values()))

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.layer.parameters())

    def peak_bytes(self) -> int:
        """The most that is held at once in a whole iteration: by the device's own counter, or storage by storage."""
        held = [*self.optimizer.held_tensors, *self.boundary, *self.data.values(), *self.gradients]
        return peak_bytes(self._iterate, held, self.device)

    def _iterate(self) -> None:
        self.backward(self.forward())
        self.sum()
        self.update()
        self.clear()


def _boundary(family: FamilyLayers, layer: int, rows: int, dtype: torch.dtype, device: torch.device) -> Boundary:
    """What lies behind a layer: values that want a gradient; nothing before the first layer."""
    if layer < 0:
        return ()
    generator = weight_generator(0, "profiling")
    found = [torch.randn(rows, *shape, generator=generator).to(device, dtype) for shape in family.boundary(layer)]
    return tuple(value.requires_grad_() for value in found)


def activation_bytes(forward: Callable[[], object], layer: nn.Module, inputs: Sequence[Tensor]) -> int:
    """Bytes that a forward keeps for its backward: each storage once, without the weights, with the input."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in inputs}
    alive = []

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(saved)  # an address tells storages apart only while all of them live
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        result = forward()
    del result
    return sum(kept.values())
