"""Random numbers of torch's default generators by row, so that a row draws the same alone and among others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright_worker.device import seed_random_numbers
from trainwright_worker.synthetic_data import hash_seed


class DrawnShapes:
    """Shapes of what a layer draws: for one row, and which dimension counts the rows.

    Attributes:
        of_one_row: `[draw]` shape in a forward of a single row.
        dimensions: `[draw]` dimension that counts the rows; None if all rows share the numbers.
    """

    def __init__(self) -> None:
        self.of_one_row: list[tuple[int, ...]] = []
        self.dimensions: list[int | None] = []


class RowRandomNumbers(TorchDispatchMode):
    """Seeds every draw by its number and the row. The first forward is of a single row, the second one of several."""

    def __init__(self, rows: Sequence[int], shapes: DrawnShapes, device: torch.device) -> None:
        super().__init__()
        self._rows, self._shapes, self._device, self._draws = rows, shapes, device, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if not _draws(func, args, named):
            return func(*args, **named)
        if func.overloadpacket is torch.ops.aten.randperm:
            ordered = func(*args, **named).sort().values
            return ordered.roll(1)  # moves all of them; half of the orders of two rows would leave both in place
        draw = self._draws
        self._draws += 1
        place = next((place for place, value in enumerate(args) if isinstance(value, Tensor | list | tuple)), None)
        size = () if place is None else _size(args[place])
        shapes = self._shapes
        if draw == len(shapes.of_one_row):
            shapes.of_one_row.append(size)
        if len(self._rows) > 1 and draw == len(shapes.dimensions):
            shapes.dimensions.append(_rows_dimension(shapes.of_one_row[draw], size, len(self._rows)))
        dimension = shapes.dimensions[draw] if draw < len(shapes.dimensions) else None
        if dimension is None or len(self._rows) == 1:
            is_known = draw < len(shapes.dimensions)
            row = 0 if is_known and dimension is None else self._rows[0]
            seed_random_numbers(hash_seed(row, draw), self._device)
            return func(*args, **named)
        parts = []
        for number, row in enumerate(self._rows):
            seed_random_numbers(hash_seed(row, draw), self._device)
            own = [_part(value, size, dimension, number, len(self._rows)) for value in args]
            parts.append(func(*own, **named))
        if func._schema.is_mutable:  # noqa: SLF001 - there is no public name for it
            return args[0]
        first, *others = parts
        if isinstance(first, Tensor):
            return torch.cat(parts, dimension)
        return tuple(torch.cat([part[index] for part in (first, *others)], dimension) for index in range(len(first)))


def _draws(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Return whether an operator draws from torch's default generator."""
    if torch.Tag.nondeterministic_seeded not in func.tags or named.get("generator") is not None:
        return False
    arguments = func._schema.arguments  # noqa: SLF001 - there is no public name for it
    given = {argument.name: argument.default_value for argument in arguments}
    given |= {**dict(zip(given, args, strict=False)), **named}
    return given.get("generator") is None and given.get("dropout_p") != 0.0


def _size(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else tuple(value)


def _rows_dimension(of_one: tuple[int, ...], of_all: tuple[int, ...], rows: int) -> int | None:
    """Return the only dimension that is `rows` times as large as for one row; None if there is none."""
    if len(of_one) != len(of_all):
        return None
    others = [place for place, (argument, every) in enumerate(zip(of_one, of_all, strict=True)) if argument != every]
    return others[0] if len(others) == 1 and of_all[others[0]] == rows * of_one[others[0]] else None


def _part(value: Any, size: tuple[int, ...], dimension: int, number: int, rows: int) -> Any:
    """Return one row's part of an argument of that size; other arguments are shared."""
    if not isinstance(value, Tensor | list | tuple) or _size(value) != size:
        return value
    length = size[dimension] // rows
    if isinstance(value, Tensor):
        return value.narrow(dimension, number * length, length)
    return [length if place == dimension else part for place, part in enumerate(value)]
