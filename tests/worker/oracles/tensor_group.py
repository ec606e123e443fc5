"""A tensor group in one process: every rank is a thread, an all-reduce is a meeting of them all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from trainwright_worker.layers.layer import Boundary, Data, Layer
from trainwright_worker.layers.tensor_parallel import TensorShard

SECONDS = 30


class _Meeting:
    def __init__(self, degree: int) -> None:
        self.barrier = threading.Barrier(degree, timeout=SECONDS)
        self.parts: list[torch.Tensor | None] = [None] * degree

    def all_reduce_of(self, index: int) -> Callable[[torch.Tensor], None]:
        def all_reduce(tensor: torch.Tensor) -> None:
            self.parts[index] = tensor.detach().clone()
            self.barrier.wait()
            total = torch.stack([part for part in self.parts if part is not None]).sum(0)
            self.barrier.wait()
            with torch.no_grad():
                tensor.copy_(total)

        return all_reduce


def passes(layer: Layer, boundary: Boundary, data: Data, gradients: Boundary) -> tuple[Boundary, Boundary, dict]:
    """Forward and backward of one rank: the outputs, the inputs' gradients, the parameters' gradients by name.

    The loss, where there is one, goes backward with gradient 1.
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
    """The same passes on every rank of a tensor group: its layer, outputs, inputs' and parameters' gradients."""
    meeting = _Meeting(degree)

    def rank(index: int) -> tuple[Layer, Boundary, Boundary, dict]:
        torch.set_num_threads(1)
        try:
            layer = make(TensorShard(index, degree, meeting.all_reduce_of(index)))
            return layer, *passes(layer, boundary, data, gradients)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(degree) as pool:
        return list(pool.map(rank, range(degree)))


def whole_gradients(ranks: list[tuple[Layer, Boundary, Boundary, dict]]) -> dict[str, torch.Tensor]:
    """Gradients of the whole parameters, put together from the ranks' parts as the layer's contract says."""
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
