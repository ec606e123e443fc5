"""What a layer is to the executor: boundary tensors in, boundary tensors out, and now and then a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from trainwright_worker.layers.tensor_parallel import TensorShard

Boundary = tuple[Tensor, ...]
"""What passes from one layer to the next: tensors whose first dimension counts the rows of the micro-batch."""

Data = Mapping[str, Tensor]
"""Fields of the batch (tokens, targets, images, …) for the rows at hand; the first dimension counts them."""

SharedWeights = dict[str, nn.Parameter]
"""Weights that layers of one rank have in common, by name; filled by the first layer that holds one."""


class Output(NamedTuple):
    """What a forward gives.

    Attributes:
        boundary: for the next layer; empty behind the last one.
        loss: summed over the rows, each row's own mean; None where the layer adds none. Being a plain sum over rows, it
            does not depend on how a plan cuts the batch; the executor divides it by the rows of the whole batch.
    """

    boundary: Boundary
    loss: Tensor | None = None

    def backward(self, gradients: Boundary, loss_gradient: float = 1.0) -> None:
        """Gradients of all that this was computed from; `gradients` are those of the boundary, one for each tensor."""
        asked = [pair for pair in zip(self.boundary, gradients, strict=True) if pair[0].requires_grad]
        if self.loss is not None:
            asked.append((self.loss, torch.full_like(self.loss, loss_gradient)))
        torch.autograd.backward([tensor for tensor, _ in asked], [gradient for _, gradient in asked])


def on_device(data: Data, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The fields on a device, in the model's number format but for indices."""
    return {field: value.to(device, dtype if value.is_floating_point() else None) for field, value in data.items()}


class Layer(nn.Module, ABC):
    """One layer on one rank: whole, or its tensor part.

    A boundary is whole on every rank of a tensor group, and so is its gradient; but where its shard is sequence
    parallel, a layer gets and gives but this rank's part of the sequence, in both directions.

    Attributes:
        reads: fields of the batch that the forward needs.
        split_dimensions: the dimension in which a tensor degree divides a parameter, by the parameter's name; those
            not named here are whole on every rank, and so are their gradients.
        partial_gradients: names of whole parameters of whose gradient each rank of a tensor group has only a part.
        shared_weights: the name that a parameter has in the whole model where other layers hold it too.
        parts_sequence: whether the layer can be sequence parallel: its boundary tensors are (rows, sequence, width), it
            has no loss, and outside of its shard's `enter` … `leave` every position is computed by itself. Each rank
            then has a part of the gradients of all whole parameters.
        shard: its own; the default where no tensor degree divides the layer.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    split_dimensions: ClassVar[Mapping[str, int]] = {}
    partial_gradients: ClassVar[frozenset[str]] = frozenset()
    shared_weights: ClassVar[Mapping[str, str]] = {}
    parts_sequence: bool = False
    shard: TensorShard = TensorShard()

    def has_partial_gradient(self, name: str) -> bool:
        """Whether each rank of a tensor group has only a part of a parameter's gradient."""
        if name in self.partial_gradients:
            return True
        return self.shard.sequence_parallel and name not in self.split_dimensions

    @abstractmethod
    def forward(self, boundary: Boundary, data: Data) -> Output:
        """The layer's output for some rows; `data` holds what `reads` names."""


class FamilyLayers(Protocol):
    """A model's layers: how to make each of them, what lies between them, and what it is trained on."""

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        """The layer with that index, in float32. Its whole weights follow from seed and index alone."""

    def boundary(self, layer: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the boundary tensors behind that layer, of one row; empty behind the last."""

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """Rows `first … first + count - 1` of an iteration's batch; they follow from seed, iteration and row alone."""
