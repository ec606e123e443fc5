"""Comparison of a full model with another implementation's: equal weights and rows give equal losses and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainwright.model import Model
from trainwright_worker.layers.layer import Data, Layer
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard


class Same(NamedTuple):
    """Parameters of both implementations with equal values; `part` selects the part of ours."""

    theirs: nn.Parameter
    ours: nn.Parameter
    part: Callable[[Tensor], Tensor] = lambda whole: whole

    def copy(self) -> None:
        with torch.no_grad():
            self.theirs.copy_(self.part(self.ours).view_as(self.theirs))


class WholeModel:
    """All layers of a family's model, unsharded; weights are perturbed, so that none is zero or one."""

    def __init__(self, family) -> None:
        self.family = make_family_layers(Model.of(family))
        shared: dict = {}
        places = range(len(Model.of(family).layers))
        self.layers: list[Layer] = [
            self.family.make(place, seed=1, shard=TensorShard(), shared=shared) for place in places
        ]
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in {
                id(parameter): parameter for layer in self.layers for parameter in layer.parameters()
            }.values():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)

    def rows(self, count: int) -> Data:
        fields = {field for layer in self.layers for field in layer.reads}
        return self.family.rows(tuple(fields), seed=1, iteration=0, first=0, count=count)

    def losses(self, rows: Data) -> list[Tensor]:
        """Return the losses of the layers, in order."""
        boundary: tuple[Tensor, ...] = ()
        found = []
        for layer in self.layers:
            output = layer(boundary, rows)
            boundary = output.boundary
            if output.loss is not None:
                found.append(output.loss)
        return found


def assert_same_training(loss: Tensor, expected: Tensor, same: Iterable[Same]) -> None:
    """Assert equal losses, and equal gradients of all parameters."""
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    loss.backward()
    expected.backward()
    for theirs, ours, part in same:
        torch.testing.assert_close(part(ours.grad).view_as(theirs), theirs.grad, rtol=1e-3, atol=1e-5)
