"""Tiles of a flat interval of a tensor: they cover each value once and in order."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import CheckpointException, load, save

from trainwright_worker.executor.checkpoint_chunks import (
    StateTile,
    Tile,
    TileLoadPlanner,
    tiles_of_interval,
)

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def intervals(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    low = draw(st.integers(0, prod(shape)))
    return shape, low, draw(st.integers(low, prod(shape)))


def numbers(shape: tuple[int, ...], box: Tile) -> list[int]:
    """Return the flat indices of a tile's values."""
    flat = torch.arange(prod(shape)).view(shape)
    pairs = zip(box.offsets, box.sizes, strict=True)
    return flat[tuple(slice(offset, offset + size) for offset, size in pairs)].flatten().tolist()


@given(intervals(), st.integers(1, 700))
def test_boxes_cover_the_interval_in_order_and_are_bounded(interval: tuple, most: int) -> None:
    shape, low, high = interval
    found = list(tiles_of_interval(shape, low, high, most))
    assert [number for box in found for number in numbers(shape, box)] == list(range(low, high))
    assert all(1 <= box.numel <= most for box in found)


@given(intervals())
def test_number_of_boxes_is_bounded_by_the_dimensions(interval: tuple) -> None:
    shape, low, high = interval
    assert len(list(tiles_of_interval(shape, low, high))) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 24, [Tile((0, 0), (4, 6))]),
        (8, 10, [Tile((1, 2), (1, 2))]),
        (4, 20, [Tile((0, 4), (1, 2)), Tile((1, 0), (2, 6)), Tile((3, 0), (1, 2))]),
        (7, 7, []),
    ],
)
def test_rows_stay_together(low: int, high: int, expected: list[Tile]) -> None:
    assert list(tiles_of_interval((4, 6), low, high)) == expected


def test_a_tensor_without_dimensions_is_one_box() -> None:
    assert list(tiles_of_interval((), 0, 1)) == [Tile((), ())]


def test_box_is_shifted() -> None:
    assert Tile((1, 0), (2, 6)).shifted(1, 6) == Tile((1, 6), (2, 6))


NAME = "weights/0.latent_weight"


def read_tile(folder: Path, shape: tuple[int, ...], tile: Tile) -> torch.Tensor:
    values = torch.zeros(tile.sizes)
    planner = TileLoadPlanner([StateTile(NAME, shape, tile, values)], folder, lambda _: None)
    load({}, checkpoint_id=folder, planner=planner, no_dist=True)
    return values


def test_a_weight_whose_first_two_dimensions_were_one_is_read(tmp_path: Path) -> None:
    whole = torch.randn(3, 4, 5)
    save({NAME: whole.flatten(0, 1)}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(read_tile(tmp_path, (3, 4, 5), Tile((1, 2, 0), (2, 2, 5))), whole[1:, 2:])
    with pytest.raises(CheckpointException, match=r"has shape \(12, 5\) in the checkpoint, but \(4, 4, 5\)"):
        read_tile(tmp_path, (4, 4, 5), Tile((0, 0, 0), (4, 4, 5)))
