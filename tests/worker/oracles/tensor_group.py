"""Tensor group in one process: every rank is a thread, and collectives use a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from trainwright_worker.layers.layer import Boundary, Data, Layer
from trainwright_worker.layers.operators.resharding import Mesh
from trainwright_worker.layers.tensor_parallel import TensorShard

T = TypeVar("T")
SECONDS = 30


class Meeting:
    """Meeting of the ranks of a group: each brings a tensor and leaves with all of them."""

    def __init__(self, degree: int) -> None:
        self.barrier = threading.Barrier(degree, timeout=SECONDS)
        self.parts: list[torch.Tensor | None] = [None] * degree

    def exchange(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return all ranks' tensors, stacked."""
        return torch.stack(self.tensors(index, tensor))

    def tensors(self, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return all ranks' tensors."""
        self.parts[index] = tensor.detach().clone()
        self.barrier.wait()
        brought = [part for part in self.parts if part is not None]
        self.barrier.wait()
        return brought


@dataclass(frozen=True)
class Thread:
    """Collectives of one rank of the group, as layers call them."""

    meeting: Meeting
    index: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> None:
        total = self.meeting.exchange(self.index, tensor).sum(0)
        with torch.no_grad():
            tensor.copy_(total)

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        return self.meeting.exchange(self.index, part)

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        return self.meeting.exchange(self.index, parts).sum(0)[self.index].clone()

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        return self.meeting.exchange(self.index, parts)[:, self.index].clone()

    def exchange(self, values: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        brought = self.meeting.tensors(self.index, values)
        counts = [row.tolist() for row in self.meeting.exchange(self.index, torch.tensor(sent))]
        parts = [tensor.split(row)[self.index] for tensor, row in zip(brought, counts, strict=True)]
        assert [len(part) for part in parts] == list(received)
        return torch.cat(parts)


def run_mesh(shape: tuple[int, int], run: Callable[[Mesh], T]) -> list[T]:
    """Return what `run` gives on every rank of a mesh of threads."""
    places = [(first, second) for first in range(shape[0]) for second in range(shape[1])]
    rows, columns = ([Meeting(shape[1 - d]) for _ in range(shape[d])] for d in (0, 1))
    everyone = Meeting(len(places))

    def rank(place: tuple[int, int]) -> T:
        torch.set_num_threads(1)
        first, second = place
        groups = (
            Thread(columns[second], first, shape[0]),
            Thread(rows[first], second, shape[1]),
            Thread(everyone, first * shape[1] + second, len(places)),
        )
        try:
            return run(Mesh(shape, place, groups))
        except BaseException:
            for meeting in (*rows, *columns, everyone):
                meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(rank, places))


def passes(layer: Layer, boundary: Boundary, data: Data, gradients: Boundary) -> tuple[Boundary, Boundary, dict]:
    """Run forward and backward of one rank. Returns outputs, the inputs' gradients and the parameters' gradients by name.

    A loss gets gradient 1.
    """
    inputs = tuple(value.detach().clone().requires_grad_(value.is_floating_point()) for value in boundary)
    output = layer(inputs, data)
    roots, seeds = list(output.boundary), [gradient.clone() for gradient in gradients]
    if output.loss is not None:
        roots.append(output.loss)
        seeds.append(torch.ones_like(output.loss))
    torch.autograd.backward(roots, seeds)
    made = (*output.boundary, *(() if output.loss is None else (output.loss,)))
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return tuple(value.detach() for value in made), tuple(value.grad for value in inputs), found


def run_group(
    make: Callable[[TensorShard], Layer], degree: int, boundary: Boundary, data: Data, gradients: Boundary
) -> list[tuple[Layer, Boundary, Boundary, dict]]:
    """Run the same passes on every rank of a tensor group. Returns each rank's layer, outputs and gradients."""
    meeting = Meeting(degree)

    def rank(index: int) -> tuple[Layer, Boundary, Boundary, dict]:
        torch.set_num_threads(1)
        try:
            layer = make(TensorShard(index, degree, Thread(meeting, index, degree)))
            return layer, *passes(layer, boundary, data, gradients)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(degree) as pool:
        return list(pool.map(rank, range(degree)))


def whole_gradients(ranks: list[tuple[Layer, Boundary, Boundary, dict]]) -> dict[str, torch.Tensor]:
    """Return the full parameters' gradients, assembled from the ranks' gradients according to the layer's contract."""
    layer = ranks[0][0]
    found = {}
    for name in ranks[0][3]:
        parts = [gradients[name] for *_, gradients in ranks]
        dimension = layer.split_dimensions.get(name)
        if dimension is not None:
            found[name] = torch.cat(parts, dimension)
        elif name in layer.partial_gradients:
            found[name] = torch.stack(parts).sum(0)
        else:
            for part in parts[1:]:
                torch.testing.assert_close(part, parts[0])
            found[name] = parts[0]
    return found
