"""Contract of every family's layers: they match the planner's counts, and tensor parts equal the full layer."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from tensor_group import Thread, passes, run_group, whole_gradients
from varied_families import VARIED_FAMILIES

from trainwright import families
from trainwright.families import T5, Bert, Gpt, Llama, Moe, Swin, TransGan, Vit, WideResnet
from trainwright.model import Model
from trainwright_worker.checkpoint_conversion import named_tensors
from trainwright_worker.layers.layer import Boundary, Data, Layer
from trainwright_worker.layers.registry import make_family_layers, supported_families
from trainwright_worker.layers.tensor_parallel import TensorShard

FAMILIES = (
    Gpt(2, 32, 4, 12, 50),
    Llama(2, 32, 4, 12, 50, intermediate_size=56, key_value_heads=2),
    Llama(1, 32, 4, 12, 50, intermediate_size=24, tied_embeddings=True),
    Bert(2, 32, 4, 12, 50),
    Bert(1, 32, 4, 12, 50, intermediate_size=40, token_types=3, next_sentence=False),
    T5(2, 32, 4, 12, 50, decoder_sequence_length=6, decoder_layers=1, intermediate_size=48),
    T5(1, 32, 4, 5, 50, decoder_sequence_length=9, position_buckets=8, tied_embeddings=False),
    Moe(1, 32, 4, 12, 50, experts=3, experts_per_token=3, intermediate_size=48, tied_embeddings=True),
    Moe(1, 32, 4, 12, 50, experts=3, intermediate_size=48, head_size=10, query_key_norm=True),
    Vit(2, 32, 4, 32, 8, classes=10),
    Vit(1, 32, 4, 16, 8, channels=1, classes=10, intermediate_size=48),
    Swin((1, 2, 2), 32, (4, 8, 4), image_size=32, patch_size=2, window_size=4, classes=10),
    Swin((1, 1), 32, image_size=16, patch_size=2, window_size=8, classes=10),
    WideResnet(50, 2, "both", 4, 64, classes=10),
    WideResnet(50, 3, "second", 4, 32, channels=1, classes=10),
    TransGan((1, 1, 0, 1), 64, 4, 4, 16, window_size=8),
    *VARIED_FAMILIES,
)
ROWS = 3

KINDS = [
    pytest.param(family, kind.name, id=f"{family.family}{number}-{kind.name}")
    for number, family in enumerate(FAMILIES)
    for kind in Model.of(family).kinds
]
EACH_FAMILY = pytest.mark.parametrize(
    "family", [pytest.param(family, id=f"{family.family}{number}") for number, family in enumerate(FAMILIES)]
)


def degrees(family) -> list[int]:
    largest = Model.of(family).max_tensor_degree
    return [degree for degree in range(2, 5) if largest % degree == 0]


PARTED = [
    pytest.param(*kind.values, degree, id=f"{kind.id}-{degree}") for kind in KINDS for degree in degrees(kind.values[0])
]


class OneKind:
    """Last layer of a kind, with random weights and inputs."""

    def __init__(self, family, name: str) -> None:
        model = Model.of(family)
        self.layers = make_family_layers(model)
        self.index = max(index for index, kind in enumerate(model.layers) if kind == name)
        self.kind = next(kind for kind in model.kinds if kind.name == name)
        self.parallel_kind = model.divided_kind(self.kind) or self.kind
        self.generator = torch.Generator().manual_seed(0)
        self.layer = self.layers.make(self.index, seed=1, shard=TensorShard(), shared={})
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(self.random(*parameter.shape) * 0.2)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def part(self, shard: TensorShard) -> Layer:
        """Return this rank's part of the same weights."""
        layer = self.layers.make(self.index, seed=1, shard=shard, shared={})
        whole = dict(self.layer.named_parameters())
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                dimension = layer.split_dimensions.get(name)
                parameter.copy_(whole[name] if dimension is None else shard.slice_weight(whole[name], dimension))
        return layer

    def values(self, shapes: tuple[tuple[int, ...], ...]) -> Boundary:
        return tuple(self.random(ROWS, *shape) for shape in shapes)

    def given(self) -> tuple[Boundary, Data, Boundary]:
        """Return the boundary and data that the layer reads, and gradients of its output."""
        boundary = self.values(self.layers.boundary(self.index - 1)) if self.index else ()
        data = self.layers.rows(self.layer.reads, seed=1, iteration=0, first=0, count=ROWS)
        return boundary, data, self.values(self.layers.boundary(self.index))


def test_the_worker_has_the_layers_of_every_family() -> None:
    """Further tests compare kinds and parameters; `test_custom.py` those of a user's model."""
    assert set(supported_families()) == set(families.FAMILIES)
    assert {family.family for family in FAMILIES} | {"custom"} == set(families.FAMILIES)


@EACH_FAMILY
def test_layers_are_of_the_planners_kinds(family) -> None:
    model = Model.of(family)
    layers = make_family_layers(model)
    made = [layers.make(index, seed=1, shard=TensorShard(), shared={}) for index in range(len(model.layers))]
    assert tuple(layers.kinds) == model.layers
    assert [numel(layer) for layer in made] == [model.kind(name).parameters for name in model.layers]


def numel(layer: Layer) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize(("family", "name"), KINDS)
def test_layer_parameters_equal_the_planners_count(family, name: str) -> None:
    one = OneKind(family, name)
    assert numel(one.layer) == one.kind.parameters
    kind = one.parallel_kind
    for degree in degrees(family):
        parts = [numel(one.part(TensorShard(index, degree))) for index in range(degree)]
        assert sum(parts) == kind.split_parameters + degree * (kind.parameters - kind.split_parameters)
        width = kind.shared_parameters // family.vocabulary_size if kind is not one.kind else 0
        assert max(parts) - kind.parameters_at(degree) <= max(width, 32)
    shared = {whole: dict(one.layer.named_parameters())[name] for name, whole in one.layer.shared_weights.items()}
    expected = {one.kind.shared_weight: one.kind.shared_parameters} if one.kind.shared_weight else {}
    assert {name: weight.numel() for name, weight in shared.items()} == expected


@pytest.mark.parametrize(("family", "name"), KINDS)
def test_layer_outputs_equal_the_planners_count(family, name: str) -> None:
    one = OneKind(family, name)
    boundary, data, _ = one.given()
    output = one.layer(boundary, data)
    shapes = one.layers.boundary(one.index)
    assert tuple(value.shape for value in output.boundary) == tuple((ROWS, *shape) for shape in shapes)
    if one.index == len(one.layers.kinds) - 1:
        assert shapes == ()
        assert output.loss is not None
    else:
        assert sum(prod(shape) for shape in shapes) == one.kind.output_elements_per_row


@pytest.mark.parametrize(("family", "name"), KINDS)
def test_losses_are_sums_over_rows(family, name: str) -> None:
    one = OneKind(family, name)
    boundary, data, _ = one.given()
    whole = one.layer(boundary, data).loss
    if whole is None:
        return
    parts = [
        one.layer(tuple(value[rows] for value in boundary), {field: value[rows] for field, value in data.items()}).loss
        for rows in (slice(0, 1), slice(1, ROWS))
    ]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize(("family", "name", "degree"), PARTED)
def test_tensor_shards_together_equal_the_layer(family, name: str, degree: int) -> None:
    one = OneKind(family, name)
    given = one.given()
    sums, gathered = [], []

    def make(shard: TensorShard) -> Layer:
        if shard.index:
            return one.part(shard)

        class Counted(Thread):
            def all_reduce(self, tensor: torch.Tensor) -> None:
                sums.append(tensor.numel())
                super().all_reduce(tensor)

            def all_gather(self, part: torch.Tensor) -> torch.Tensor:
                gathered.append(part.nbytes)
                return super().all_gather(part)

        return one.part(replace(shard, collectives=Counted(**vars(shard.collectives))))

    outputs, inputs, gradients = passes(one.layer, *given)
    ranks = run_group(make, degree, *given)
    for _, part_outputs, part_inputs, _ in ranks:
        torch.testing.assert_close(part_outputs, outputs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(part_inputs, inputs, rtol=1e-4, atol=1e-5)
    found = whole_gradients(ranks)
    assert found.keys() == gradients.keys()
    for parameter, expected in gradients.items():
        torch.testing.assert_close(found[parameter], expected, rtol=1e-4, atol=1e-4)
    segments = one.parallel_kind.segments
    forward = [ROWS * segment.forward_all_reduce_elements_per_row for segment in segments]
    backward = [ROWS * segment.backward_all_reduce_elements_per_row for segment in reversed(segments)]
    assert sums == [size for size in forward + backward if size]
    assert sum(gathered) == ROWS * sum(segment.forward_gathered_bytes_per_row for segment in segments)


@EACH_FAMILY
def test_weights_depend_only_on_seed_and_layer_number(family) -> None:
    model = Model.of(family)
    layers = make_family_layers(model)

    def weights(order, seed: int) -> dict[str, torch.Tensor]:
        shared: dict = {}
        made = {index: layers.make(index, seed=seed, shard=TensorShard(), shared=shared) for index in order}
        return {
            f"{index} {name}": weight.detach()
            for index, layer in sorted(made.items())
            for name, weight in layer.named_parameters()
        }

    places = range(len(model.layers))
    first, again, other = weights(places, 1), weights(reversed(places), 1), weights(places, 2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@EACH_FAMILY
def test_layers_of_one_rank_hold_a_shared_weight_once(family) -> None:
    model = Model.of(family)
    layers, shared = make_family_layers(model), {}
    made = [layers.make(index, seed=1, shard=TensorShard(), shared=shared) for index in range(len(model.layers))]
    values = {id(parameter): parameter for layer in made for parameter in layer.parameters()}
    assert sum(parameter.numel() for parameter in values.values()) == model.parameters
    assert len({parameter.data_ptr() for parameter in values.values()}) == len(values)
    for layer in made:
        parameters = dict(layer.named_parameters())
        assert all(parameters[name] is shared[whole] for name, whole in layer.shared_weights.items())


@EACH_FAMILY
def test_rows_do_not_depend_on_how_they_are_batched(family) -> None:
    model = Model.of(family)
    layers = make_family_layers(model)
    made = [layers.make(index, seed=1, shard=TensorShard(), shared={}) for index in range(len(model.layers))]
    fields = tuple(dict.fromkeys(field for layer in made for field in layer.reads))
    together = layers.rows(fields, seed=1, iteration=3, first=0, count=5)
    assert tuple(together) == fields
    for field in fields:
        assert together[field].shape[0] == 5
        for first, count in ((0, 1), (1, 3), (4, 1)):
            part = layers.rows((field,), seed=1, iteration=3, first=first, count=count)[field]
            assert torch.equal(part, together[field][first : first + count])
    for changed in ({"seed": 2}, {"iteration": 4}, {"first": 5}):
        other = layers.rows(fields, **{"seed": 1, "iteration": 3, "first": 0, "count": 5, **changed})
        assert not all(torch.equal(other[field], together[field]) for field in fields)


@EACH_FAMILY
def test_checkpoints_name_every_weight_of_a_model_once(family) -> None:
    model = Model.of(family)
    weights = named_tensors(model)
    assert len({weight.name for weight in weights}) == len(weights)
    assert sum(prod(weight.shape) for weight in weights) == model.parameters
    assert all(len(weight.torch_names) == 1 for weight in weights if weight.name[0].isdigit())
