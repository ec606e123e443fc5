"""Layers on meshes of threads whose operators each shard random loops, compared with the same layer as a whole."""

from __future__ import annotations

import random
from copy import deepcopy
from functools import lru_cache
from itertools import product

import torch
from operator_plans import specs_of
from row_groups import normalise_in_groups
from tensor_group import passes, run_mesh
from torch import nn

from trainwright.loop_nests.layer_wiring import wire_layer
from trainwright.model import Model
from trainwright.operator_shardings import LayerSpecs, Loop, LoopMapping, SpanSpecs
from trainwright.worker_api.operator_support import layer_problems
from trainwright_worker.layers.operators.layouts import COPIED, REPLICATED, Layout, sharding_dimensions
from trainwright_worker.layers.operators.operator_layer import OperatorLayer
from trainwright_worker.layers.operators.resharding import Mesh
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard

ROWS = 4
TOLERANCE = 1e-5
"""Largest difference, over the largest value of the tensor."""


@lru_cache(maxsize=256)
def _mappings(model: Model, layer: int, shape: tuple[int, int]) -> tuple[tuple[LoopMapping, ...], ...]:
    """Return the mappings of every operator that run: those that the worker does not refuse."""
    kind = model.kind_of(layer)
    operations = wire_layer(model, kind).operations
    replicated = [specs_of(operation, (None, None)) for operation in operations]
    found = []
    for index, operation in enumerate(operations):
        loops = [loop for loop, _ in operation.loops]
        options = [[None, *loops] if size > 1 else [None] for size in shape]
        runs = []
        for mapping in product(*options):
            changed = [*replicated[:index], specs_of(operation, mapping), *replicated[index + 1 :]]
            span = SpanSpecs(shape, (LayerSpecs(layer, kind.name, tuple(changed)),))
            even_rows = ROWS % span.parts(changed[index], Loop.BATCH) == 0
            if even_rows and next(layer_problems(span.layers[0], span, model), None) is None:
                runs.append(mapping)
        found.append(tuple(runs))
    return tuple(found)


def random_specs(model: Model, layer: int, shape: tuple[int, int], seed: int) -> LayerSpecs:
    """Return specs of a layer whose operators each shard random loops; few of them shard none."""
    draw = random.Random(seed)
    operations = wire_layer(model, model.kind_of(layer)).operations
    specs = []
    for operation, mappings in zip(operations, _mappings(model, layer, shape), strict=True):
        full = [mapping for mapping in mappings if None not in mapping]
        specs.append(specs_of(operation, draw.choice(full if full and draw.random() < 0.8 else mappings)))
    return LayerSpecs(layer, model.layers[layer], tuple(specs))


def _random_layout(tensor: torch.Tensor, axes: tuple[int, ...], shape: tuple[int, int], seed: int) -> Layout:
    draw = random.Random(seed)
    while True:
        first, second = (draw.choice((REPLICATED, *axes)) for _ in shape)
        parts = dict.fromkeys(axes, 1)
        for placement, size in zip((first, second), shape, strict=True):
            if placement in parts:
                parts[placement] *= size
        if all(tensor.shape[axis] % count == 0 for axis, count in parts.items()):
            return first, second


def _assert_close(tensor: torch.Tensor, expected: torch.Tensor, name: str = "boundary") -> None:
    difference = float((tensor - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    assert difference < TOLERANCE, f"{name}: off by {difference:.1e} of the largest value"


def check_layer(
    model: Model, specs: LayerSpecs, shape: tuple[int, int], seed: int, *, axes: tuple[int, ...] = (0, 1, 2)
) -> None:
    """Compare a layer on a mesh with the whole one: what leaves, the loss, and the gradients of inputs and weights.

    The whole one normalises batches over the rows of each rank.

    `axes`: of the boundary, any of which a mesh dimension may shard when it enters.
    """
    torch.manual_seed(seed)
    layer, family = specs.layer, make_family_layers(model)
    whole = family.make(layer, seed=seed, shard=TensorShard(), shared={})
    for parameter in whole.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    data = family.rows(whole.reads, seed=seed, iteration=0, first=0, count=ROWS)
    boundary = tuple(torch.randn(ROWS, *each) for each in family.boundary(layer - 1)) if layer else ()
    gradients = tuple(torch.randn(ROWS, *each) for each in family.boundary(layer))
    reference = deepcopy(whole)
    normalise_in_groups(reference, specs, shape)
    expected, of_inputs, of_weights = passes(reference, boundary, data, gradients)
    entering = tuple(_random_layout(tensor, axes, shape, seed + place) for place, tensor in enumerate(boundary))
    wiring = wire_layer(model, model.kind_of(layer))

    def run(mesh: Mesh) -> torch.Tensor | None:
        own = OperatorLayer(whole, specs, wiring, mesh, entering)
        for attribute, placed in own.operators.placed.items():
            part = mesh.own_part(whole.get_parameter(attribute).detach(), placed.layout).clone()
            own.register_weight(attribute, nn.Parameter(part))
        assert set(dict(own.named_parameters())) == set(of_weights), "weights of the layer that no operator uses"
        inputs = tuple(map(mesh.own_part, boundary, entering))
        seeds = tuple(map(mesh.own_part, gradients, own.leaving))
        made, inner, weights = passes(own, inputs, data, seeds)
        left = made[: len(gradients)]
        for tensor, total, layout in zip(left, expected, own.leaving, strict=False):
            _assert_close(tensor, mesh.own_part(total, layout))
        for gradient, total, layout in zip(inner, of_inputs, entering, strict=True):
            assert (gradient is None) == (total is None)
            if total is not None:  # T5's head does not read the encoder's output
                _assert_close(gradient, mesh.own_part(total, layout))
        for attribute, placed in own.operators.placed.items():
            gradient = weights[attribute]
            group = mesh.group(sharding_dimensions(placed.layout, COPIED))
            if group is not None:
                group.all_reduce(gradient)
            _assert_close(gradient, mesh.own_part(of_weights[attribute], placed.layout), attribute)
        return made[len(gradients)] if len(made) > len(gradients) else None

    losses = run_mesh(shape, run)
    if len(expected) > len(gradients):
        torch.testing.assert_close(torch.stack([loss for loss in losses if loss is not None]).sum(), expected[-1])
