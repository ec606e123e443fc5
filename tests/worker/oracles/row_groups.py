"""Batch normalisation of a whole layer over the rows of each rank, as operators divide them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from trainwright.operator_shardings import LayerSpecs, Loop, SpanSpecs
from trainwright_worker.layers.image_models import NormedConvolution
from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.operators.sharded_layers import operators_of


def normalise_in_groups(layer: Layer, specs: LayerSpecs, shape: tuple[int, int]) -> None:
    """Let the batch normalisations of a whole layer use the rows of one rank after the other."""
    span = SpanSpecs(shape, (specs,))
    for operator in specs.operators:
        weights = operators_of(layer)[operator.name].weights
        module = layer.get_submodule(weights[0].attribute.rpartition(".")[0]) if weights else None
        if isinstance(module, NormedConvolution) and operator.name.endswith("_normalisation"):
            module.normalise = partial(_normalise, module, span.parts(operator, Loop.BATCH))


def _normalise(module: NormedConvolution, groups: int, features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    parts = [NormedConvolution.normalise(module, rows, weight, bias) for rows in features.chunk(groups)]
    return torch.cat(parts)
