"""Figures of a model as they are read back: parts, active and frozen parameters, bytes of state."""

from __future__ import annotations

import pytest

from trainwright.families import T5, Custom, CustomKind, Gpt, Moe, Swin
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.report.model_reading import ModelReading


@pytest.mark.parametrize(
    "family",
    [
        T5(2, 64, 4),
        T5(2, 64, 4, tied_embeddings=False),
        Moe(2, 64, 4, 32, tied_embeddings=True),
        Swin((2, 2), 64, (2, 4)),
    ],
)
def test_parts_add_up_to_the_parameters(family) -> None:
    reading = ModelReading.of(Model.of(family, Dtype.FLOAT32), "adam")
    assert sum(reading.parts.values()) == reading.parameters
    assert all(size > 0 for size in reading.parts.values())


def test_tied_weight_counts_once() -> None:
    reading = ModelReading.of(Model.of(Gpt(2, 64, 4, 32, 512), Dtype.BFLOAT16), "adam")
    assert sum(reading.parts.values()) == reading.parameters == reading.active_parameters
    assert reading.parts["embedding"] == 512 * 64 + 32 * 64
    assert "head" not in reading.parts
    assert reading.state_bytes == (2 + 4 + 8 + 4) * reading.parameters


def test_a_token_passes_through_its_experts_alone() -> None:
    reading = ModelReading.of(Model.of(Moe(2, 64, 4, 32, experts=8, experts_per_token=2)), "adam")
    assert reading.parameters - reading.active_parameters == reading.parts["experts"] * 6 // 8


def test_described_model_is_told_by_its_kinds_and_frozen_weights_have_no_state() -> None:
    kinds = (
        CustomKind("Stem", 100, 1e6, 64, 128.0, frozen_parameters=100),
        CustomKind("Head", 50, 1e6, 1, 128.0),
    )
    reading = ModelReading.of(Model.of(Custom("models:make", kinds, ("Stem", "Head")), Dtype.FLOAT32), "adam")
    assert reading.parts == {"Stem": 100, "Head": 50}
    assert reading.state_bytes == pytest.approx(100 * 4 + 50 * (4 + 4 + 8))


def test_described_model_counts_a_shared_weight_where_it_comes_first() -> None:
    kinds = (
        CustomKind("Stem", 100, 1e6, 64, 128.0, shared_weight="table", shared_parameters=40),
        CustomKind("Head", 50, 1e6, 1, 128.0, shared_weight="table", shared_parameters=40),
    )
    reading = ModelReading.of(Model.of(Custom("models:make", kinds, ("Stem", "Head")), Dtype.FLOAT32), "sgd")
    assert reading.parts == {"Stem": 100, "Head": 10}
    assert reading.parameters == 110
