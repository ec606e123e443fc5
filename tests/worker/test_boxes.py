"""Boxes cover a flat interval of a tensor, each value once and in order."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright_worker.executor.boxes import Box, boxes

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def intervals(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    low = draw(st.integers(0, prod(shape)))
    return shape, low, draw(st.integers(low, prod(shape)))


def numbers(shape: tuple[int, ...], box: Box) -> list[int]:
    """The places in the flat tensor of a box's values."""
    flat = torch.arange(prod(shape)).view(shape)
    pairs = zip(box.offsets, box.sizes, strict=True)
    return flat[tuple(slice(offset, offset + size) for offset, size in pairs)].flatten().tolist()


@given(intervals(), st.integers(1, 700))
def test_boxes_are_the_interval_in_order_and_none_is_larger_than_asked(interval: tuple, most: int) -> None:
    shape, low, high = interval
    found = list(boxes(shape, low, high, most))
    assert [number for box in found for number in numbers(shape, box)] == list(range(low, high))
    assert all(1 <= box.values <= most for box in found)


@given(intervals())
def test_no_more_boxes_than_a_rim_of_each_dimension_needs(interval: tuple) -> None:
    shape, low, high = interval
    assert len(list(boxes(shape, low, high))) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 24, [Box((0, 0), (4, 6))]),
        (8, 10, [Box((1, 2), (1, 2))]),
        (4, 20, [Box((0, 4), (1, 2)), Box((1, 0), (2, 6)), Box((3, 0), (1, 2))]),
        (7, 7, []),
    ],
)
def test_rows_stay_together(low: int, high: int, expected: list[Box]) -> None:
    assert list(boxes((4, 6), low, high)) == expected


def test_a_tensor_without_dimensions_is_one_box() -> None:
    assert list(boxes((), 0, 1)) == [Box((), ())]


def test_a_moved_box() -> None:
    assert Box((1, 0), (2, 6)).moved(1, 6) == Box((1, 6), (2, 6))
