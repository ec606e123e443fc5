"""One layer kind on one device, as a stage would hold it: forward, backward and update, its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainwright.cluster import Emulation
from trainwright.layer import LayerKind
from trainwright.worker_api import ProfilingTask
from trainwright_worker.emulation import backward_segments, forward_segments
from trainwright_worker.executor.flat_parameter import FlatParameter, ShardGroup, Weight, publish_updates
from trainwright_worker.executor.optimizer import (
    GradientNorm,
    GradientScaling,
    Optimizer,
    SquaredNorm,
    make_optimizer,
)
from trainwright_worker.executor.stage_module import TORCH_DTYPES
from trainwright_worker.initial_weights import deferred_weights
from trainwright_worker.layers.custom import CustomLayers
from trainwright_worker.layers.layer import Boundary, Data, FamilyLayers, Layer, Output, to_device
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.live_bytes import measure_peak_bytes, passed_on
from trainwright_worker.synthetic_data import weight_generator


@dataclass(frozen=True)
class LayerUnderTest:
    """Layer under benchmark, with its flat parameter, optimizer and inputs.

    Attributes:
        gradients: gradients of the layer's output boundary, as the next layer would return them.
        frozen: flat parameters of weights that are not trained.
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
    frozen: tuple[FlatParameter, ...] = ()

    @classmethod
    def of(
        cls, task: ProfilingTask, kind: LayerKind, rows: int, device: torch.device, beat: Callable[[str], None]
    ) -> LayerUnderTest:
        """Make the layer on the device; `beat` is called while its weights are drawn."""
        model, family = task.model, make_family_layers(task.model)
        emulation = task.gang.emulation_of(task.gang.nodes[0].accelerator)
        number = model.layers.index(kind.name)
        shard = TensorShard(0, task.tensor_degree)
        with deferred_weights(device) as initial:
            layer = family.make(number, seed=0, shard=shard, shared={})
        dtype = TORCH_DTYPES[model.dtype]
        trained, frozen = (
            [
                Weight(name, parameter, initial=initial.get(parameter))
                for name, parameter in layer.named_parameters()
                if parameter.requires_grad is is_trained
            ]
            for is_trained in (True, False)
        )
        flat_parameters = [
            FlatParameter(weights, ShardGroup(), dtype=dtype, device=device, is_trained=weights is trained, beat=beat)
            for weights in (trained, frozen)
            if weights
        ]
        optimizer = make_optimizer(task.optimizer, [flat for flat in flat_parameters if flat.is_trained], 1e-4)
        data = family.rows(layer.reads, seed=0, iteration=0, first=0, count=rows) if layer.reads else {}
        data = to_device(data, device, dtype, model.float32_fields)
        boundary = layer.lay_out(_random_boundary(family, number - 1, rows, dtype, device))
        gradients = layer.lay_out(_random_boundary(family, number, rows, dtype, device))
        boundary = tuple(
            value.requires_grad_(value.is_floating_point() and not kind.without_backward) for value in boundary
        )
        return cls(
            kind,
            rows,
            layer,
            boundary,
            data,
            gradients,
            optimizer,
            device,
            emulation,
            task.tensor_degree,
            tuple(flat for flat in flat_parameters if not flat.is_trained),
        )

    def forward(self) -> Output:
        for flat_parameter in self.optimizer.flat_parameters:
            flat_parameter.ensure_gradients()
        with torch.set_grad_enabled(not self.kind.without_backward):
            output: Output = self.layer(self.boundary, self.data)
        return output

    def backward(self, output: Output) -> None:
        if self.kind.without_backward:
            return
        output.backward(self.gradients)
        for flat_parameter in self.optimizer.flat_parameters:
            flat_parameter.accumulate_gradients()

    def reduce_gradients(self) -> None:
        """Treat the gradients as reduced, since there is one replica."""
        for flat_parameter in self.optimizer.flat_parameters:
            flat_parameter.keep_gradient_shard()

    def update_weights(self) -> None:
        self.optimizer.step(self._gradient_scaling())
        publish_updates(self.optimizer.flat_parameters)

    def _gradient_scaling(self) -> GradientScaling | None:
        """Return the scaling of a float16 layer's update, which takes the norm of gradients; None in other formats.

        The update is not skipped, whatever random gradients are.
        """
        flat_parameters = self.optimizer.flat_parameters
        if all(flat_parameter.full_values.dtype is not torch.float16 for flat_parameter in flat_parameters):
            return None
        norms = [
            SquaredNorm(flat_parameter, includes_split=True, includes_unsplit=True)
            for flat_parameter in flat_parameters
        ]
        norm = GradientNorm(norms, None, self.device).compute()
        return GradientScaling(torch.ones_like(norm).float(), torch.zeros_like(norm).float())

    def reset_gradients(self) -> None:
        """Reset gradients to the state before a first micro-batch."""
        for value in self.boundary:
            value.grad = None
        for flat_parameter in self.optimizer.flat_parameters:
            flat_parameter.zero_gradients()

    def paced_seconds(self) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
        """Return the emulated seconds of forward, backward and update; empty on a real device."""
        if self.emulation is None:
            return (), (), ()
        pieces = forward_segments(self.emulation, self.kind, rows=self.rows, tensor=self.tensor_degree)
        forward = [piece.seconds for piece in pieces]
        backward = [piece.seconds for piece in backward_segments(pieces, self.kind.backward_share)]
        values = sum(parameter.numel() for parameter in self.layer.parameters() if parameter.requires_grad)
        return [sum(forward)], [sum(backward)], [self.emulation.update_seconds(values)]

    @property
    def activation_bytes(self) -> int:
        """Bytes that a forward stores for its backward, including its input."""
        if self.kind.without_backward:
            return 0
        # Buffers of a family's layers, such as tables of angles, have no price of their own, so they count here.
        buffers = self.layer.buffers() if self.kind.buffer_bytes else ()
        resident = *self.layer.parameters(), *buffers
        # Older descriptions count what a layer hands on at each layer that takes it.
        passed = passed_on(self.boundary, self.forward().boundary) if self.kind.passed_elements_per_row else []
        inputs = [value for value in self.boundary if all(value is not other for other in passed)]
        return activation_bytes(self.forward, (*resident, *passed), (*inputs, *self.data.values()))

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.layer.parameters())

    def peak_bytes(self) -> int:
        """Return the peak bytes of a whole iteration, by the device's memory counter or by tracking storages."""
        frozen = [tensor for flat_parameter in self.frozen for tensor in flat_parameter.resident_tensors]
        inputs = *self.boundary, *self.data.values(), *self.gradients
        resident = [*self.optimizer.resident_tensors, *frozen, *self.layer.buffers(), *inputs]
        return measure_peak_bytes(self._run_iteration, resident, self.device)

    def _run_iteration(self) -> None:
        self.backward(self.forward())
        self.reduce_gradients()
        self.update_weights()
        self.reset_gradients()


def _random_boundary(family: FamilyLayers, layer: int, rows: int, dtype: torch.dtype, device: torch.device) -> Boundary:
    """Return random values of the boundary after a layer, and a user's layer's own integers; empty before the first layer."""
    if layer < 0:
        return ()
    generator = weight_generator(0, "profiling")
    values = [torch.randn(rows, *shape, generator=generator).to(device) for shape in family.boundary(layer)]
    if not isinstance(family, CustomLayers):
        return tuple(value.to(dtype) for value in values)
    given = zip(values, family.formats(layer, dtype), family.integers(layer, rows, device), strict=True)
    return tuple(value.to(own) if integers is None else integers for value, own, integers in given)


def activation_bytes(forward: Callable[[], object], resident: Iterable[Tensor], inputs: Sequence[Tensor]) -> int:
    """Return the bytes that a forward stores for its backward: each storage once, with the input, without what is resident."""
    storages = {value.untyped_storage().data_ptr() for value in resident}
    stored_bytes = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in inputs}
    live_tensors = []

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in storages:
            stored_bytes[storage.data_ptr()] = storage.nbytes()
            live_tensors.append(saved)  # keep it alive: addresses identify storages only while all of them live
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        result = forward()
    del result
    return sum(stored_bytes.values())
