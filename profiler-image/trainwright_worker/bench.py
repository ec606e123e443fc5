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
from trainwright_worker.layers.layer import Boundary, Data, FamilyLayers, Layer, Output
from trainwright_worker.layers.of_model import layers_of
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.memory import LiveBytes


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
        data = {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in data.items()}
        boundary = _boundary(family, number - 1, rows, dtype, device)
        gradients = tuple(value.detach() for value in _boundary(family, number, rows, dtype, device))
        return cls(kind, rows, layer, boundary, data, gradients, optimizer, device, emulation, order.tensor_degree)

    def forward(self) -> Output:
        for unit in self.optimizer.units:
            unit.expect()
        output: Output = self.layer(self.boundary, self.data)
        return output

    def backward(self, output: Output) -> None:
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        for tensor, gradient in zip(output.boundary, self.gradients, strict=True):
            if tensor.requires_grad:
                roots.append(tensor)
                seeds.append(gradient)
        if output.loss is not None:
            roots.append(output.loss)
            seeds.append(torch.ones_like(output.loss))
        torch.autograd.backward(roots, seeds)
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
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._iterate()
            return torch.cuda.max_memory_allocated(self.device)
        held = [tensor for unit in self.optimizer.units for tensor in unit.held_tensors]
        states = [state for states in self.optimizer.states for state in states]
        with LiveBytes([*held, *states, *self.boundary, *self.data.values(), *self.gradients]) as live:
            self._iterate()
        return live.peak_bytes

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
