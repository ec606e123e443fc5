"""Initial values of weights, drawn on the device and in any part, the same under every plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from trainwright_worker.synthetic_data import hash_seed

SCALE = 0.02
"""Standard deviation of the normal initial values of GPT-2 and BERT."""

TILE_COLUMNS = 512
TILE_VALUES = 2**15
"""Values of a tile. CUDA gives them one thread each on every supported GPU (a T4 runs 160 blocks of 256 at once), so all
kinds of GPUs draw the same; for larger tiles the values depend on the number of multiprocessors."""


class WeightSource:
    """Source of the initial weights of one layer or tied weight; each has its own seed, by its number."""

    def __init__(self, seed: int, owner: str) -> None:
        self._seed = hash_seed(seed, *owner.encode())
        self._count = 0

    def next_seed(self) -> int:
        self._count += 1
        return hash_seed(self._seed, self._count)


def part_start(size: int, index: int, degree: int) -> int:
    """Return where the `index`-th of `degree` parts of a dimension starts; a part is a union of parts of multiple degrees."""
    return index * size // degree


@dataclass(frozen=True, slots=True)
class NormalWeight:
    """Normal initial values with mean zero: a full weight, or one of the parts of its split dimension.

    Values are drawn in tiles of the weight as a matrix, whose columns are its last dimension. Each tile has its own random
    generator, so any values can be drawn without most of the others. GPUs draw other values than CPUs.

    Attributes:
        full_shape: shape of the full weight.
        scales: standard deviation, by equal part of the dimensions before the split one.
        index, degree: this is the `index`-th of `degree` parts.
    """

    seed: int
    full_shape: tuple[int, ...]
    scales: tuple[float, ...]
    split_dimension: int | None = None
    index: int = 0
    degree: int = 1

    def part(self, dimension: int | None, index: int, degree: int) -> NormalWeight:
        """Return one of the parts of a full weight; None does not split it."""
        if dimension is None:
            return self
        return replace(self, split_dimension=dimension, index=index, degree=degree)

    def box(self, parts: Mapping[int, tuple[int, int]]) -> InitialValues:
        """Return a part of a full weight that is split in several dimensions.

        Args:
            parts: index of the part and number of equal parts, by dimension.
        """
        rows = 0 if len(self.scales) == 1 else 1
        if self.split_dimension is not None and not self._splits_columns:
            rows = self.split_dimension
        box: InitialValues = self.part(rows, *parts.get(rows, (0, 1)))
        for dimension, (index, count) in parts.items():
            if dimension != rows and count > 1:
                size = self.full_shape[dimension]
                box = NormalBox(box, dimension, part_start(size, index, count), part_start(size, index + 1, count))
        return box

    @property
    def shape(self) -> tuple[int, ...]:
        start, stop = self._interval
        sizes = enumerate(self.full_shape)
        return tuple(stop - start if place == self.split_dimension else size for place, size in sizes)

    @property
    def _interval(self) -> tuple[int, int]:
        """Start and stop of this part of the split dimension; (0, 0) if none is split."""
        size = 0 if self.split_dimension is None else self.full_shape[self.split_dimension]
        return part_start(size, self.index, self.degree), part_start(size, self.index + 1, self.degree)

    def draw_into(self, target: Tensor, start: int) -> None:
        """Write the values of the flattened part from `start` on to a flat tensor."""
        generator, matrix_size = make_generator(target.device), self._rows * self._columns
        end = start + target.numel()
        for matrix in range(start // matrix_size, -(-end // matrix_size)):
            first = matrix * matrix_size
            low, high = max(start, first), min(end, first + matrix_size)
            self._draw_matrix(target[low - start : high - start], matrix, low - first, generator)

    def _draw_matrix(self, target: Tensor, matrix: int, start: int, generator: torch.Generator) -> None:
        """Write the values of one of the matrices from `start` on."""
        columns = self._columns
        row_offset, column_offset, full_rows = 0, 0, self._rows
        if self._splits_columns:
            column_offset = self._interval[0]
        elif self.split_dimension is not None:
            row_offset = self._interval[0] * prod(self.full_shape[self.split_dimension + 1 : -1])
            full_rows = prod(self.full_shape[self.split_dimension : -1])
        scale = self.scales[matrix * len(self.scales) // self._matrices]
        pieces = [
            _Piece(view, row + row_offset, column + column_offset)
            for view, row, column in _rectangles(target, start, columns)
        ]
        tile_columns = min(self.full_shape[-1], TILE_COLUMNS)
        tile_rows = max(1, min(full_rows, TILE_VALUES // tile_columns))
        top, bottom = min(piece.row for piece in pieces), max(piece.row + len(piece.values) for piece in pieces)
        for row in range(top // tile_rows * tile_rows, bottom, tile_rows):
            for column in range(0, self.full_shape[-1], tile_columns):
                overlapping = [piece for piece in pieces if piece.overlaps(row, column, tile_rows, tile_columns)]
                if overlapping:
                    generator.manual_seed(hash_seed(self.seed, matrix, row, column))
                    size = min(tile_rows, full_rows - row), min(tile_columns, self.full_shape[-1] - column)
                    tile = target.new_empty(size, dtype=torch.float32)
                    tile.normal_(0.0, scale, generator=generator)
                    for piece in overlapping:
                        piece.copy_from(tile, row, column)

    @property
    def _splits_columns(self) -> bool:
        return self.split_dimension == len(self.full_shape) - 1

    @property
    def _matrices(self) -> int:
        """Number of matrices: one for each index of the dimensions before the split one, so that parts are whole rows."""
        if self.split_dimension is None or self._splits_columns:
            return len(self.scales)
        return prod(self.full_shape[: self.split_dimension])

    @property
    def _rows(self) -> int:
        """Rows of one matrix that this part holds."""
        return prod(self.shape[:-1]) // self._matrices

    @property
    def _columns(self) -> int:
        return self.shape[-1]


@dataclass(frozen=True, slots=True)
class NormalBox:
    """Part of normal initial values of which one more dimension is split.

    Attributes:
        whole: values with all of that dimension.
        first, stop: interval of the dimension.
    """

    whole: InitialValues
    dimension: int
    first: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        whole = self.whole.shape
        return (*whole[: self.dimension], self.stop - self.first, *whole[self.dimension + 1 :])

    def draw_into(self, target: Tensor, start: int) -> None:
        """Write the values of the flattened part from `start` on to a flat tensor."""
        inner = prod(self.shape[self.dimension + 1 :])
        if self.dimension == 0:
            self.whole.draw_into(target, self.first * inner + start)
            return
        own, full = (self.stop - self.first) * inner, self.whole.shape[self.dimension] * inner
        top, bottom = start // own, -(-(start + target.numel()) // own)
        values = target.new_empty((bottom - top) * full, dtype=torch.float32)
        self.whole.draw_into(values, top * full)
        part = values.view(bottom - top, -1)[:, self.first * inner : self.stop * inner].flatten()
        target.copy_(part[start - top * own :][: target.numel()])


InitialValues = NormalWeight | NormalBox
"""Initial values that are drawn where they are kept."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rectangle of a matrix to be drawn, and where it begins."""

    values: Tensor
    row: int
    column: int

    def overlaps(self, row: int, column: int, rows: int, columns: int) -> bool:
        height, width = self.values.shape
        return (
            row < self.row + height
            and self.row < row + rows
            and column < self.column + width
            and self.column < column + columns
        )

    def copy_from(self, tile: Tensor, row: int, column: int) -> None:
        (height, width), (rows, columns) = self.values.shape, tile.shape
        top, bottom = max(self.row, row), min(self.row + height, row + rows)
        left, right = max(self.column, column), min(self.column + width, column + columns)
        self.values[top - self.row : bottom - self.row, left - self.column : right - self.column].copy_(
            tile[top - row : bottom - row, left - column : right - column]
        )


def _rectangles(flat: Tensor, start: int, columns: int) -> Iterator[tuple[Tensor, int, int]]:
    """Yield views of a flat part of a matrix as rectangles, each with its first row and column."""
    place = 0
    while place < len(flat):
        row, column = divmod(start + place, columns)
        rows = (len(flat) - place) // columns if column == 0 else 0
        size = rows * columns or min(columns - column, len(flat) - place)
        yield flat[place : place + size].view(max(rows, 1), -1), row, column
        place += size


def make_generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device)


def normal(source: WeightSource, *shape: int, scale: float | tuple[float, ...] = SCALE) -> NormalWeight:
    """Return normal initial values; several scales are those of equal parts of the first dimension."""
    return NormalWeight(source.next_seed(), shape, scale if isinstance(scale, tuple) else (scale,))


InitialWeights = Mapping[str, NormalWeight | Tensor]
"""Initial values of full weights, by name."""

DeferredWeights = Mapping[nn.Parameter, NormalWeight]
"""Initial values of parameters that have none yet."""

_deferred: ContextVar[dict[nn.Parameter, NormalWeight] | None] = ContextVar("deferred", default=None)


@contextmanager
def deferred_weights(device: torch.device) -> Iterator[DeferredWeights]:
    """Make layers on a device without drawing their weights, whose initial values are yielded.

    A parameter then has its shape, but memory for one value only.
    """
    deferred: dict[nn.Parameter, NormalWeight] = {}
    token = _deferred.set(deferred)
    try:
        with torch.device(device):
            yield deferred
    finally:
        _deferred.reset(token)


def make_parameter(initial: NormalWeight | Tensor) -> nn.Parameter:
    """Return a parameter with these initial values."""
    if isinstance(initial, Tensor):
        return nn.Parameter(initial)
    deferred = _deferred.get()
    if deferred is None:
        values = torch.empty(initial.shape)
        initial.draw_into(values.view(-1), 0)
        return nn.Parameter(values)
    parameter = nn.Parameter(torch.empty(()).expand(initial.shape))
    deferred[parameter] = initial
    return parameter
