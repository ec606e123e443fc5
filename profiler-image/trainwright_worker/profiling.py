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
from trainwright.families import EMBEDDING, HEAD
from trainwright.layer import LayerKind
from trainwright.model import Model
from trainwright.orders import ProfileOrder, ProfileReport
from trainwright.profiles import LayerProfile
from trainwright_worker import output
from trainwright_worker.batches import token_rows, weight_generator
from trainwright_worker.device import synchronize
from trainwright_worker.emulation import Pacer, backward_pieces, forward_pieces
from trainwright_worker.executor.parameters import Optimizer, ParameterBuffer, make_optimizer
from trainwright_worker.family import gpt_of
from trainwright_worker.layers.gpt import make_layer
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
    layer: nn.Module
    inputs: tuple[Tensor, ...]
    batch_tokens: int
    optimizer: Optimizer
    device: torch.device
    emulation: Emulation | None
    tensor_degree: int

    @classmethod
    def of(
        cls, order: ProfileOrder, kind: LayerKind, rows: int, device: torch.device, emulation: Emulation | None
    ) -> _Bench:
        model = order.model
        shard = TensorShard(0, order.tensor_degree)
        number = model.layers.index(kind.name)
        layer = make_layer(model, number, seed=0, shard=shard, shared={}).to(device)
        optimizer = make_optimizer(order.optimizer, [ParameterBuffer(list(layer.parameters()))], 1e-4)
        inputs = tuple(value.to(device) for value in _inputs(model, kind, rows))
        tokens = rows * gpt_of(model).sequence_length
        return cls(kind, rows, layer, inputs, tokens, optimizer, device, emulation, order.tensor_degree)

    def forward(self) -> Tensor:
        if self.kind.name == HEAD:
            return self.layer(*self.inputs, self.batch_tokens)  # type: ignore[no-any-return]
        return self.layer(*self.inputs)  # type: ignore[no-any-return]

    def paces(self) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
        """Seconds of forward, backward and update on the emulated device, piece by piece; empty on a real one."""
        if self.emulation is None:
            return (), (), ()
        pieces = forward_pieces(self.emulation, self.kind, rows=self.rows, tensor=self.tensor_degree)
        forward = [piece.seconds for piece in pieces]
        backward = [piece.seconds for piece in backward_pieces(pieces)]
        values = sum(parameter.numel() for parameter in self.layer.parameters())
        return [sum(forward)], [sum(backward)], [self.emulation.update_seconds(values)]


def _inputs(model: Model, kind: LayerKind, rows: int) -> tuple[Tensor, ...]:
    """What a layer of this kind reads: tokens, hidden states that want a gradient, or both for the head."""
    gpt = gpt_of(model)
    tokens, targets = token_rows(gpt, seed=0, iteration=0, first=0, count=rows)
    if kind.name == EMBEDDING:
        return (tokens,)
    generator = weight_generator(0, "profiling")
    hidden = torch.randn(rows, gpt.sequence_length, gpt.hidden_size, generator=generator)
    hidden.requires_grad_()
    return (hidden, targets) if kind.name == HEAD else (hidden,)


def _profile(order: ProfileOrder, bench: _Bench, accelerator: str, watchdog: Watchdog) -> LayerProfile:
    pacer = Pacer(active=bench.emulation is not None)
    forward_pace, backward_pace, update_pace = bench.paces()
    forwards, backwards, updates = [], [], []
    gradient = torch.randn_like(bench.forward().detach())
    for number in range(order.warmup_iterations + order.iterations):
        watchdog.beat(f"profiling {bench.kind.name} with {bench.rows} rows")
        outputs: list[Tensor] = []
        forward = _timed(bench.device, pacer, forward_pace, partial(_keep_forward, bench, outputs))
        backward = _timed(bench.device, pacer, backward_pace, partial(outputs.pop().backward, gradient))
        update = _timed(bench.device, pacer, update_pace, bench.optimizer.step)
        for value in bench.inputs:
            value.grad = None
        bench.optimizer.buffers[0].clear()
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
        activation_bytes=activation_bytes(bench.forward, bench.layer, bench.inputs),
        parameter_bytes=sum(parameter.nbytes for parameter in bench.layer.parameters()),
        samples=order.iterations,
        relative_spread=relative_spread(both),
    )


def _keep_forward(bench: _Bench, outputs: list[Tensor]) -> None:
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


def activation_bytes(forward: Callable[[], Tensor], layer: nn.Module, inputs: Sequence[Tensor]) -> int:
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
