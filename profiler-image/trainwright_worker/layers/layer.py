"""Contract of a layer in the executor, and losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import Bert, Gpt, Llama, Moe, Vit
from trainwright.layer import Attention
from trainwright_worker.initial_weights import InitialWeights, NormalWeight, make_parameter
from trainwright_worker.layers.tensor_parallel import TensorShard

Boundary = tuple[Tensor, ...]
"""Boundary between two layers: tensors whose first dimension counts the rows (samples) of the micro-batch."""

Data = Mapping[str, Tensor]
"""Fields of the batch (tokens, targets, images, …) for some rows; the first dimension counts them."""

SharedWeights = dict[str, nn.Parameter]
"""Weights tied between layers of one rank that have the same part of them, by name; the first layer with one adds it."""


class Output(NamedTuple):
    """Result of a layer's forward.

    Attributes:
        boundary: input of the next layer; empty after the last one.
        loss: sum over the rows of each row's mean loss; None if the layer has no loss. A plain sum over rows does not depend
            on how a plan splits the batch; the executor divides it by the rows, or the weight, of the whole batch.
        absolute_loss: the same sum of absolute values; None where no row's loss is negative, so that it is `loss`.
        weight: sum of the rows' weights, by which a user's loss is averaged; None if every row counts alike.
    """

    boundary: Boundary
    loss: Tensor | None = None
    absolute_loss: Tensor | None = None
    weight: Tensor | None = None

    def backward(self, gradients: Boundary, loss_gradient: float = 1.0) -> None:
        """Compute the gradients of all inputs and weights, given those of the boundary's tensors."""
        differentiable = [pair for pair in zip(self.boundary, gradients, strict=True) if pair[0].requires_grad]
        if self.loss is not None:
            differentiable.append((self.loss, torch.full_like(self.loss, loss_gradient)))
        torch.autograd.backward([tensor for tensor, _ in differentiable], [gradient for _, gradient in differentiable])


def to_device(
    data: Data, device: torch.device, dtype: torch.dtype, float32_fields: Collection[str] = ()
) -> dict[str, Tensor]:
    """Move the fields to a device, and floating-point ones to the model's dtype but for some that stay float32."""
    return {
        field: value.to(device, field_dtype(value, torch.float32 if field in float32_fields else dtype))
        for field, value in data.items()
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Return a number format's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def field_dtype(value: Tensor, dtype: torch.dtype) -> torch.dtype | None:
    """Return the format in which layers take a field where floats are in `dtype`; None: as it is."""
    return dtype if value.is_floating_point() else None


class Layer(nn.Module, ABC):
    """Layer on one rank, unsharded or as its tensor-parallel part.

    Boundaries and their gradients are replicated over a tensor group; but under sequence parallelism a layer receives and
    returns only this rank's part of the sequence, in both directions.

    Attributes:
        reads: fields of the batch that the forward needs.
        split_dimensions: dimension that the tensor degree splits, by parameter name; other parameters and their gradients
            are replicated over the tensor group.
        partial_gradients: replicated parameters of whose gradient each rank of a tensor group computes only one summand.
        split_sizes: full size of the split dimension, by parameter name, where the tensor degree need not divide it.
        shared_weights: model-wide name of each tied parameter.
        draws_random_numbers: whether its forward may draw from torch's default generators (dropout).
        mixes_rows: whether a row's output depends on the rows that are computed with it (batch normalisation).
        has_pure_forward: whether its forward changes neither its buffers nor its inputs.
        supports_sequence_parallel: whether the layer can run sequence parallel: its boundary tensors are (rows, sequence,
            width), every rank has its whole loss if it has one, and outside of `copy_to_tensor_group` …
            `reduce_from_tensor_group` every position is computed independently. Each rank then computes one summand of the gradients of all replicated parameters.
        shard: this rank's tensor shard; the default if no tensor degree splits the layer.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    split_dimensions: ClassVar[Mapping[str, int]] = {}
    partial_gradients: ClassVar[frozenset[str]] = frozenset()
    shared_weights: ClassVar[Mapping[str, str]] = {}
    draws_random_numbers: ClassVar[bool] = False
    mixes_rows: ClassVar[bool] = False
    has_pure_forward: ClassVar[bool] = True
    supports_sequence_parallel: bool = False
    split_sizes: Mapping[str, int] = {}
    shard: TensorShard = TensorShard()

    def register_shards(self, whole: InitialWeights) -> None:
        """Register this rank's parts of full weights as parameters, split along `split_dimensions`."""
        for name, weight in whole.items():
            dimension = self.split_dimensions.get(name)
            if isinstance(weight, NormalWeight):
                self.register_parameter(
                    name, make_parameter(weight.part(dimension, self.shard.index, self.shard.degree))
                )
            else:
                part = weight if dimension is None else self.shard.slice_weight(weight, dimension)
                self.register_parameter(name, make_parameter(part))

    def split_size(self, name: str) -> int | None:
        """Return the full size of the dimension that the tensor degree splits; None for a replicated parameter."""
        dimension = self.split_dimensions.get(name)
        if dimension is None:
            return None
        return self.split_sizes.get(name, self.get_parameter(name).shape[dimension] * self.shard.degree)

    def has_partial_gradient(self, name: str) -> bool:
        """Return whether each rank of a tensor group computes only one summand of a parameter's gradient."""
        if name in self.partial_gradients:
            return True
        return self.shard.sequence_parallel and name not in self.split_dimensions

    def checkpoint_name(self, layer: int, attribute: str) -> str:
        """Return the name of a parameter or buffer in checkpoints, if this is the layer with that index."""
        return f"{layer}.{attribute}"

    def torch_names(self, layer: int, attribute: str) -> tuple[str, ...]:
        """Return its names in checkpoints of torch's own trainers."""
        return (f"layers.{layer}.{attribute}",)

    def persistent_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that a checkpoint holds, by attribute."""
        persistent = self.state_dict().keys()
        for attribute, buffer in self.named_buffers(remove_duplicate=False):
            if attribute in persistent:
                yield attribute, buffer

    def lay_out(self, boundary: Boundary) -> Boundary:
        """Return the boundary in the memory format that the forward computes in; shapes and values stay.

        Messages are in the order of the shapes, whatever the format on either side.
        """
        return boundary

    @abstractmethod
    def forward(self, boundary: Boundary, data: Data) -> Output:
        """Compute the layer's output for some rows; `data` holds the fields in `reads`."""


class ReadRows(Protocol):
    """Source of training data."""

    def __call__(
        self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int
    ) -> Mapping[str, Tensor]:
        """Return rows `first … first + count - 1` of an iteration's batch; they depend only on seed, iteration and row."""


class FamilyLayers(Protocol):
    """Layers of a model: their construction, the boundaries between them, and the training data."""

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        """Build the layer with that index, in float32. Its full weights depend only on seed and index."""

    def boundary(self, layer: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes for one row of the boundary tensors after a layer; empty after the last one."""

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """Return rows `first … first + count - 1` of an iteration's batch; they depend only on seed, iteration and row."""


def summed_row_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return cross-entropy of logits (rows, …, classes) against targets (rows, …): mean within each row, sum over rows.

    It is computed in float32, since a half-precision sum over a vocabulary loses digits.
    """
    positions = targets[0].numel()
    flat = logits.flatten(0, -2).float()
    return functional.cross_entropy(flat, targets.flatten(), reduction="sum") / positions


class StackedLayers:
    """Kinds of a family's layers, all with the same boundary between them."""

    def __init__(self, family: Gpt | Llama | Bert | Moe | Vit) -> None:
        self.kinds = family.stack(Attention.FUSED).layers
        self.hidden = family.sequence_length, family.hidden_size

    def boundary(self, layer: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes for one row of the boundary after a layer; empty after the last one."""
        return () if layer == len(self.kinds) - 1 else (self.hidden,)
