"""Bytes that layers store for the backward: exactly the planner's counts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kept_bytes import beside, kept
from tensor_group import Meeting, Thread
from torch.nn import functional
from varied_families import VARIED_FAMILIES

from trainwright.families import T5, Bert, Gpt, Llama, Swin, TransGan, Vit, WideResnet
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright_worker.layers import image_models
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard

FAMILIES = (
    Gpt(1, 32, 4, 12, 50),
    Llama(1, 32, 4, 12, 50, intermediate_size=56, key_value_heads=2),
    Bert(1, 32, 4, 12, 50, intermediate_size=40),
    Bert(1, 32, 4, 12, 50, next_sentence=False),
    T5(1, 32, 4, 12, 50, decoder_sequence_length=6, intermediate_size=48),
    T5(1, 32, 4, 5, 50, decoder_sequence_length=9, tied_embeddings=False),
    Vit(1, 32, 4, 32, 8, classes=10),
    Swin((2, 2, 1), 32, (4, 4, 8), image_size=32, patch_size=2, window_size=4, classes=10),
    WideResnet(50, 2, "both", 8, 64, classes=10),
    WideResnet(50, 3, "second", 4, 32, classes=10),
    TransGan((1, 1, 0, 1), 64, 2, 4, 16, window_size=8),
    *VARIED_FAMILIES,
)
FEW, MANY = 2, 6

LAYERS = [
    pytest.param(family, layer, degree, id=f"{family.family}{number}-{layer}-{name}-{degree}")
    for number, family in enumerate(FAMILIES)
    for layer, name in enumerate(Model.of(family).layers)
    for degree in (1, 2)
    if Model.of(family).max_tensor_degree % degree == 0
]


class _KeepsOneStatistic(torch.autograd.Function):
    """RMSNorm that stores what a GPU's fused kernel does; torch decomposes it on CPUs into operators that store more."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        inverse = values.square().mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(values, weight, inverse)
        return values * inverse * weight


@pytest.fixture(autouse=True)
def fused_rms_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "rms_norm", lambda values, _, weight, __: _KeepsOneStatistic.apply(values, weight))


@pytest.mark.parametrize(
    ("family", "index", "degree"), [one for one in LAYERS if isinstance(one.values[0], WideResnet | Vit | Swin)]
)
def test_layer_saved_bytes_are_the_same_channels_last(
    family, index: int, degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_models, "convolves_channels_last", lambda *_: True)
    test_layer_saved_bytes_equal_the_planners_count(family, index, degree)


@pytest.mark.parametrize(("family", "index", "degree"), LAYERS)
def test_layer_saved_bytes_equal_the_planners_count(family, index: int, degree: int) -> None:
    model = Model.of(family)
    kind = model.kind_of(index)
    if degree > 1:
        kind = model.divided_kind(kind) or kind
    expected = kind.saved_bytes_per_row(Dtype.FLOAT32, degree) + beside(family, kind.name)
    few, many = (_kept(family, index, degree, rows) for rows in (FEW, MANY))
    assert (many - few) / (MANY - FEW) == expected


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(
    ("family", "name"),
    [(family, kind) for family in FAMILIES if isinstance(family, Swin | T5) for kind in ("encoder", "decoder",
     "block_0", "block_1") if kind in Model.of(family).layers],
)  # fmt: skip
def test_biases_of_scores_are_saved_once_for_all_rows(family, name: str, degree: int) -> None:
    model = Model.of(family)
    per_row = model.kind(name).saved_bytes_per_row(Dtype.FLOAT32, degree)
    # Windows are shifted in every second block alone, so a kind's count is the mean over its layers.
    found = [
        _kept(family, index, degree, FEW) - FEW * per_row for index, kind in enumerate(model.layers) if kind == name
    ]
    assert min(found) > 0
    expected = model.kind(name).saved_bytes(Dtype.FLOAT32, degree, FEW) - FEW * per_row
    assert sum(found) / len(found) == expected


PARTED = [
    pytest.param(*one.values[:2], id=one.id)
    for one in LAYERS
    for model in (Model.of(one.values[0]),)
    if one.values[2] == 2 and model.allows_sequence_parallel(model.kind_of(one.values[1]), 2)
]


@pytest.mark.parametrize(("family", "index"), PARTED)
def test_sequence_parallel_layers_save_what_the_planner_counts(family, index: int) -> None:
    model = Model.of(family)
    kind = model.divided_kind(model.kind_of(index)) or model.kind_of(index)
    expected = kind.saved_bytes_per_row(Dtype.FLOAT32, 2, sequence_parallel=True) + beside(family, kind.name)
    few, many = (_kept_by_a_rank(family, index, rows) for rows in (FEW, MANY))
    assert (many - few) / (MANY - FEW) == expected


def _kept_by_a_rank(family, index: int, rows: int) -> int:
    """Return what the first of two ranks keeps that divide the sequence."""
    layers, meeting, found = make_family_layers(Model.of(family)), Meeting(2), []

    def run(rank: int) -> None:
        shard = TensorShard(rank, 2, Thread(meeting, rank, 2), sequence_parallel=True)
        layer = layers.make(index, seed=1, shard=shard, shared={})
        if isinstance(family, T5) and hasattr(layer, "position_biases"):
            layer.position_biases.requires_grad_(False)
        shapes = layers.boundary(index - 1) if index else ()
        boundary = tuple(torch.randn(rows, length // 2, *rest).requires_grad_() for length, *rest in shapes)
        found.append(kept(layer, boundary, layers.rows(layer.reads, seed=1, iteration=0, first=0, count=rows)))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert found[0] == found[1]
    return found[0]


def _kept(family, index: int, degree: int, rows: int) -> int:
    layers = make_family_layers(Model.of(family))
    layer = layers.make(index, seed=1, shard=TensorShard(0, degree), shared={})
    if isinstance(family, Swin | T5) and hasattr(layer, "position_biases"):
        # torch's fused CPU attention takes no biases that require a gradient; the GPU kernels do, and store the same.
        layer.position_biases.requires_grad_(False)
    shapes = layers.boundary(index - 1) if index else ()
    boundary = layer.lay_out(tuple(torch.randn(rows, *shape) for shape in shapes))
    boundary = tuple(tensor.requires_grad_() for tensor in boundary)
    return kept(layer, boundary, layers.rows(layer.reads, seed=1, iteration=0, first=0, count=rows))
