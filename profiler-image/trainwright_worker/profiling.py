"""Layer profiling: each distinct layer kind by itself, forward, backward and update, on one device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from trainwright.cluster import Emulation
from trainwright.layer import LayerKind
from trainwright.orders import ProfileOrder, ProfileReport
from trainwright.profiles import LayerProfile
from trainwright_worker import output
from trainwright_worker.batches import weight_generator
from trainwright_worker.device import synchronize
from trainwright_worker.emulation import Pacer, backward_pieces, forward_pieces
from trainwright_worker.executor.optimizer import Optimizer, make_optimizer
from trainwright_worker.executor.stage import TORCH_DTYPES
from trainwright_worker.executor.unit import Replicas, Unit, Weight
from trainwright_worker.layers.layer import Boundary, Data, FamilyLayers, Layer, Output
from trainwright_worker.layers.of_model import layers_of
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.seat import Seat
from trainwright_worker.watchdog import Watchdog


def run(order: ProfileOrder, seat: Seat, device: torch.device, watchdog: Watchdog) -> ProfileReport:
    """Measure every kind at the order's tensor degree; kinds that are not tensor parallel at degree 1 alone."""
    accelerator = order.gang.nodes[0].accelerator
    emulation = order.gang.emulation_of(accelerator)
    kinds = [kind for kind in order.model.kinds if order.tensor_degree == 1 or kind.is_tensor_parallel]
    wanted = [(kind, rows) for kind in kinds for rows in order.rows]
    found = []
    for number, (kind, rows) in enumerate(wanted):
        watchdog.beat(f"profiling {kind.name} with {rows} rows")
        bench = _Bench.of(order, kind, rows, device, emulation)
        found.append(_profile(order, bench, accelerator, watchdog))
        if seat.is_speaker:
            output.progress(number + 1, len(wanted), "layer profiles")
    return ProfileReport(tuple(found))


@dataclass(frozen=True)
class _Bench:
    """One layer kind with an input, ready to be measured."""

    kind: LayerKind
    rows: int
    layer: Layer
    boundary: Boundary
    data: Data
    optimizer: Optimizer
    device: torch.device
    emulation: Emulation | None
    tensor_degree: int

    @classmethod
    def of(
        cls, order: ProfileOrder, kind: LayerKind, rows: int, device: torch.device, emulation: Emulation | None
    ) -> _Bench:
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
        boundary = _boundary(family, number, rows, dtype, device)
        return cls(kind, rows, layer, boundary, data, optimizer, device, emulation, order.tensor_degree)

    def forward(self) -> Output:
        for unit in self.optimizer.units:
            unit.expect()
        output: Output = self.layer(self.boundary, self.data)
        return output

    def backward(self, output: Output, gradients: Boundary) -> None:
        roots, seeds = list(output.boundary), list(gradients)
        if output.loss is not None:
            roots.append(output.loss)
            seeds.append(torch.ones_like(output.loss))
        torch.autograd.backward(roots, seeds)
        for unit in self.optimizer.units:
            unit.collect()

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
        """Seconds of forward, backward and update on the emulated device, piece by piece; empty on a real one."""
        if self.emulation is None:
            return (), (), ()
        pieces = forward_pieces(self.emulation, self.kind, rows=self.rows, tensor=self.tensor_degree)
        forward = [piece.seconds for piece in pieces]
        backward = [piece.seconds for piece in backward_pieces(pieces)]
        values = sum(parameter.numel() for parameter in self.layer.parameters())
        return [sum(forward)], [sum(backward)], [self.emulation.update_seconds(values)]


def _boundary(family: FamilyLayers, layer: int, rows: int, dtype: torch.dtype, device: torch.device) -> Boundary:
    """What a layer reads of the one before: values that want a gradient; nothing for the first layer."""
    if layer == 0:
        return ()
    generator = weight_generator(0, "profiling")
    found = [torch.randn(rows, *shape, generator=generator).to(device, dtype) for shape in family.boundary(layer - 1)]
    return tuple(value.requires_grad_() for value in found)


def _profile(order: ProfileOrder, bench: _Bench, accelerator: str, watchdog: Watchdog) -> LayerProfile:
    pacer = Pacer(active=bench.emulation is not None)
    forward_pace, backward_pace, update_pace = bench.paces()
    forwards, backwards, updates = [], [], []
    gradients = tuple(torch.randn_like(value) for value in bench.forward().boundary)
    for number in range(order.warmup_iterations + order.iterations):
        watchdog.beat(f"profiling {bench.kind.name} with {bench.rows} rows")
        outputs: list[Output] = []
        forward = _timed(bench.device, pacer, forward_pace, partial(_keep_forward, bench, outputs))
        backward = _timed(bench.device, pacer, backward_pace, partial(bench.backward, outputs.pop(), gradients))
        update = _timed(bench.device, pacer, update_pace, _summed_update(bench))
        bench.clear()
        if number >= order.warmup_iterations:
            forwards.append(forward)
            backwards.append(backward)
            updates.append(update)
    both = [forward + backward for forward, backward in zip(forwards, backwards, strict=True)]
    return LayerProfile(
        accelerator=accelerator,
        kind=bench.kind.name,
        tensor_degree=order.tensor_degree,
        rows=bench.rows,
        forward_seconds=statistics.median(forwards),
        backward_seconds=statistics.median(backwards),
        update_seconds=statistics.median(updates),
        activation_bytes=activation_bytes(bench.forward, bench.layer, (*bench.boundary, *bench.data.values())),
        parameter_bytes=sum(parameter.nbytes for parameter in bench.layer.parameters()),
        samples=order.iterations,
        relative_spread=relative_spread(both),
    )


def _summed_update(bench: _Bench) -> Callable[[], None]:
    """The update, with gradients that need no sum: there is one replica."""
    for unit in bench.optimizer.units:
        unit.take_whole()
    return bench.update


def _keep_forward(bench: _Bench, outputs: list[Output]) -> None:
    outputs.append(bench.forward())


def _timed(device: torch.device, pacer: Pacer, pace: Sequence[float], work: Callable[[], object]) -> float:
    synchronize(device)
    pacer.synchronize()
    begin = time.perf_counter()
    pacer.start(pace, waited_seconds=0.0)
    work()
    pacer.finish()
    synchronize(device)
    return time.perf_counter() - begin


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


def relative_spread(samples: Sequence[float]) -> float:
    """(90th - 10th percentile) / median, 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return (deciles[-1] - deciles[0]) / statistics.median(samples)
