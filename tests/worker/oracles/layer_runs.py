"""Sequential runs of a family's layers, and copies of their weights into another library's modules."""

from __future__ import annotations

import torch
from torch import nn

from trainwright.model import Model
from trainwright_worker.layers.layer import Data, Layer
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard


def made(model: Model, *, seed: int = 1) -> list[Layer]:
    """Return all layers of a model, unsharded, with nonzero biases as after some training."""
    family, shared = make_family_layers(model), {}
    layers = [family.make(layer, seed=seed, shard=TensorShard(), shared=shared) for layer in range(len(model.layers))]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return layers


def run(layers: list[Layer], rows: Data) -> torch.Tensor:
    """Return the sum of the rows' losses."""
    boundary, losses = (), []
    for layer in layers:
        output = layer(boundary, rows)
        boundary = output.boundary
        if output.loss is not None:
            losses.append(output.loss)
    assert boundary == ()
    return torch.stack(losses).sum()


def copy_linear(theirs: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Copy our weight and bias into a linear layer or a convolution."""
    theirs.weight.copy_(weight)
    assert (theirs.bias is None) == (bias is None)
    if bias is not None:
        theirs.bias.copy_(bias)


def copy_norm(theirs: nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> None:
    theirs.weight.copy_(weight)
    theirs.bias.copy_(bias)
