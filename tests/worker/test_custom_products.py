"""Products that a user's layers compute, by shape."""

from __future__ import annotations

from dataclasses import replace

import plain_model
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.accelerators.roofline import estimate_profiles
from trainwright.families import MAX_PRODUCTS, Custom, CustomKind, CustomProduct
from trainwright.families.operators import convolution, matmul
from trainwright.layer import Dtype, Operator
from trainwright.model import Model
from trainwright_worker.layers.custom import CustomModel
from trainwright_worker.model_description.description import describe

TOKENS, WIDTH = 4, plain_model.WIDTH


class Layer(nn.Module):
    """Layer between rows of WIDTH values."""

    def body(self, values: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, values: Tensor) -> Tensor:
        return values + self.body(values).flatten(1).mean(1, keepdim=True)


class Pixels(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 6, 3, stride=2, padding=1)

    def body(self, values: Tensor) -> Tensor:
        return self.layer(values[:, None, :, None].expand(-1, 2, -1, 8))


class Upsampled(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ConvTranspose2d(1, 3, 2, stride=2)

    def body(self, values: Tensor) -> Tensor:
        return self.layer(values[:, None, :, None].expand(-1, -1, -1, 8))


class Tokens(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def body(self, values: Tensor) -> Tensor:
        return self.layer(values[:, None].repeat(1, TOKENS, 1))


class Steps(Tokens):
    def body(self, values: Tensor) -> Tensor:
        return sum(self.layer(values + step) for step in range(5))


class Transposed(Tokens):
    """The weight comes first."""

    def body(self, values: Tensor) -> Tensor:
        return (self.layer.weight @ values.T).T


class Scores(Layer):
    def body(self, values: Tensor) -> Tensor:
        tokens = values[:, None].repeat(1, TOKENS, 1)
        return tokens @ tokens.mT


class Causal(Layer):
    def body(self, values: Tensor) -> Tensor:
        heads = values[:, None, None].repeat(1, 2, TOKENS, 1)
        return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


class CausalWithValues(Causal):
    """Runs on the CPU, since it reads values."""

    def body(self, values: Tensor) -> Tensor:
        float(values.detach().sum())
        return super().body(values)


class OfWeightsAlone(Tokens):
    def body(self, values: Tensor) -> Tensor:
        weight = self.layer.weight.T @ self.layer.weight
        return values * weight.sum(0)


class ManyShapes(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, size) for size in range(1, MAX_PRODUCTS + 5))

    def body(self, values: Tensor) -> Tensor:
        return torch.cat([layer(values) for layer in self.layers], 1)


@pytest.fixture
def kind_of(monkeypatch: pytest.MonkeyPatch):
    def describe_layer(layer: type[nn.Module]) -> CustomKind:
        def made() -> CustomModel:
            return plain_model.model(layer)

        monkeypatch.setattr(plain_model, "made", made, raising=False)
        return describe("plain_model:made", check_seconds=0).kinds[1]

    return describe_layer


def product(name: str, operator: Operator, calls: int = 1) -> CustomProduct:
    sizes = operator.forward_flops_per_row, operator.input_elements_per_row, operator.output_elements_per_row
    return CustomProduct(name, operator.positions_per_row, *sizes, calls)


ATTENTION = CustomProduct("attention", TOKENS, 8.0 * TOKENS * TOKENS * WIDTH, 6 * TOKENS * WIDTH, 2 * TOKENS * WIDTH)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (Tokens, product("matmul", matmul("", TOKENS, WIDTH, 3))),
        (Steps, product("matmul", matmul("", 1, WIDTH, 3), calls=5)),
        (Transposed, product("matmul", matmul("", 1, WIDTH, 3))),
        (Pixels, product("convolution", convolution("", 4 * 4, 2, 6, 3, input_positions=8 * 8))),
        (Upsampled, CustomProduct("convolution", 8 * 8, 2.0 * 64 * 12, 64, 3 * 16 * 16)),
        (Scores, CustomProduct("batched_matmul", TOKENS, 2.0 * TOKENS**2 * WIDTH, 2 * TOKENS * WIDTH, TOKENS**2)),
        (Causal, replace(ATTENTION, is_causal=True)),
        (CausalWithValues, replace(ATTENTION, is_causal=True)),
        (OfWeightsAlone, None),
    ],
)
def test_products_have_the_figures_of_the_families_operators(kind_of, layer, expected: CustomProduct | None) -> None:
    kind = kind_of(layer)
    assert kind.products == (() if expected is None else (expected,))
    assert kind.forward_flops_per_row == sum(one.calls * one.forward_flops_per_row for one in kind.products)


def test_the_smallest_of_many_shapes_are_merged(kind_of) -> None:
    kind = kind_of(ManyShapes)
    assert len(kind.products) == MAX_PRODUCTS
    assert [one.output_elements_per_row for one in kind.products[:2]] == [MAX_PRODUCTS + 4, MAX_PRODUCTS + 3]
    *_, smallest, merged = kind.products
    assert (merged.calls, merged.output_elements_per_row) == (5, 3)
    assert smallest.output_elements_per_row == 6
    assert kind.forward_flops_per_row == sum(one.calls * one.forward_flops_per_row for one in kind.products)


def seconds(kind: CustomKind) -> tuple[float, float]:
    model = Model.of(Custom("module:entry", (kind,), ("Layer",)), Dtype.FLOAT16)
    (profile,) = estimate_profiles(model, ["A100-40"], tensor_degrees=[1], rows=[8]).layers
    return profile.forward_seconds, profile.backward_seconds


def test_several_calls_take_as_long_as_one_after_another() -> None:
    one = CustomProduct("matmul", 1024, 2.0**31, 2.0**20, 2.0**20)
    sizes = {"parameters": 2**20, "output_elements_per_row": 2**20, "saved_elements_per_row": 2.0**20}
    together, apart = (
        seconds(CustomKind("Layer", forward_flops_per_row=3 * 2.0**31, products=products, **sizes))
        for products in ((replace(one, calls=3),), (one, one, one))
    )
    assert together == pytest.approx(apart)


def test_small_products_reach_less_than_a_square_one() -> None:
    """FLOPs without a shape take as long as those of a square product."""
    flops, tokens, width = 2.0**37, 1024, 8
    thin = CustomProduct("matmul", tokens, 2.0 * tokens * width * width, tokens * width, tokens * width)
    sizes = {"parameters": 2**20, "output_elements_per_row": 2**20, "saved_elements_per_row": 2.0**20}
    counted, unknown, half = (
        seconds(CustomKind("Layer", forward_flops_per_row=flops, products=products, **sizes))[0]
        for products in (
            (replace(thin, calls=round(flops / thin.forward_flops_per_row)),),
            (),
            (replace(thin, calls=round(flops / thin.forward_flops_per_row / 2)),),
        )
    )
    assert counted > 5 * unknown
    assert counted / 2 < half < counted / 2 + unknown
