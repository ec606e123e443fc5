"""Layers that are parts of a whole model, which `build` of a user's model makes."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainwright.families import CustomChecks
from trainwright_worker.layers import custom
from trainwright_worker.layers.custom import CustomLayers, CustomModel
from trainwright_worker.layers.custom_makers import LayerMakers, part
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.model_description import description
from trainwright_worker.model_description.description import describe

WIDTH = 6


class Whole(nn.Module):
    """Two blocks and a head, whose second block starts as the first one does."""

    built = 0

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        type(self).built += not torch.empty(()).is_meta
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.blocks[1].load_state_dict(self.blocks[0].state_dict())
        self.scale = nn.Parameter(torch.randn(WIDTH))
        if tied:
            self.blocks[1].weight = self.blocks[0].weight


class Head(nn.Module):
    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, values, targets):
        return (values * self.scale - targets).square().mean(1)


def rows(*, seed: int, iteration: int, first: int, count: int) -> dict[str, torch.Tensor]:
    number = torch.arange(first, first + count)[:, None] + seed + iteration
    return {"values": (number * torch.arange(1.0, WIDTH + 1)).sin(), "targets": (number + torch.zeros(WIDTH)).cos()}


LAYERS = [*[part(lambda block: block, f"blocks.{number}") for number in range(2)], part(Head, "scale")]


def model(build=Whole) -> CustomModel:
    return CustomModel(LAYERS, rows, build=build)


def made(layers: CustomLayers, seed: int) -> list[nn.Module]:
    return [layers.make(number, seed=seed, shard=TensorShard(), shared={}).module for number in range(len(layers))]


def test_all_layers_of_a_process_are_parts_of_one_model() -> None:
    layers = CustomLayers("entry point own:model", model())
    Whole.built = 0
    first, second, head = made(layers, seed=4)
    assert Whole.built == 1
    assert torch.equal(first.weight, second.weight)
    assert first.weight is not second.weight
    again = made(CustomLayers("entry point own:model", model()), seed=4)
    assert torch.equal(head.scale, again[2].scale)
    other = made(layers, seed=5)
    assert not torch.equal(first.weight, other[0].weight)


def test_a_later_stage_has_the_weights_of_the_same_model() -> None:
    layers = CustomLayers("entry point own:model", model())
    head = layers.make(2, seed=4, shard=TensorShard(), shared={})
    assert torch.equal(head.module.scale, made(layers, seed=4)[2].scale)


def test_the_whole_model_is_freed_when_rows_are_asked_for() -> None:
    makers = LayerMakers(model())
    first = makers.whole()
    assert makers.whole() is first
    makers.forget()
    assert makers.whole() is not first


def test_a_weight_of_two_layers_is_shared_without_being_named() -> None:
    layers = CustomLayers("entry point own:model", model(lambda: Whole(tied=True)))
    names = {number: (shared.name, shared.own_name) for number, shared in layers.shared_weights.items()}
    assert names == {0: ("blocks.0.weight", "weight"), 1: ("blocks.0.weight", "weight")}
    shared: dict = {}
    first, second = (layers.make(number, seed=4, shard=TensorShard(), shared=shared).module for number in range(2))
    assert first.weight is second.weight
    assert first.bias is not second.bias
    alone = layers.make(1, seed=4, shard=TensorShard(), shared={})
    assert torch.equal(alone.module.weight, first.weight)
    assert not CustomLayers("entry point own:model", model()).shared_weights


def test_parts_that_share_two_weights_are_refused_by_their_names() -> None:
    def build() -> Whole:
        whole = Whole(tied=True)
        whole.blocks[1].bias = whole.blocks[0].bias
        return whole

    with pytest.raises(
        ValueError, match=r"layer 1 shares two weights with other layers, weight and bias, .*a single layer"
    ):
        CustomLayers("entry point own:model", model(build))


def test_a_model_larger_than_the_host_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = CustomLayers("entry point own:model", model())
    needed = 4 * (2 * (WIDTH * WIDTH + WIDTH) + WIDTH)
    monkeypatch.setattr(custom, "host_bytes", lambda: needed)
    custom.check_memory(layers)
    monkeypatch.setattr(custom, "host_bytes", lambda: needed - 1)
    with pytest.raises(ValueError, match=r"build\(\) makes .* this host has .*; leave build out"):
        custom.check_memory(layers)


def test_every_process_of_a_host_holds_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = CustomLayers("entry point own:model", model())
    needed = 4 * (2 * (WIDTH * WIDTH + WIDTH) + WIDTH)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(custom, "host_bytes", lambda: 4 * needed)
    custom.check_memory(layers)
    monkeypatch.setattr(custom, "host_bytes", lambda: 4 * needed - 1)
    with pytest.raises(ValueError, match=r"build\(\) makes .* in each of 4 processes, but this host has"):
        custom.check_memory(layers)


def small() -> CustomModel:
    return model()


def test_the_whole_model_is_built_once_to_check_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "small_whole", SimpleNamespace(small=small))
    monkeypatch.setattr(description, "other_process", lambda *_: nullcontext())  # it would import these layers
    Whole.built = 0
    assert describe("small_whole:small").checks == CustomChecks()
    assert Whole.built == 1


def large() -> CustomModel:
    """Return a model whose whole one is larger than the memory of checks, of which its layers are a small part."""

    def build() -> nn.Module:
        whole = Whole()
        with torch.device("meta"):
            whole.rest = nn.Linear(50_000, 50_000)
        return whole

    return model(build)


def test_a_large_whole_model_is_not_built_to_check_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "large_whole", SimpleNamespace(large=large))
    Whole.built = 0
    checks = describe("large_whole:large").checks
    assert Whole.built == 0
    assert any("another process: the whole model takes" in sentence for sentence in checks.left_out)
    assert sum("values of" in sentence for sentence in checks.left_out) == len(LAYERS)
