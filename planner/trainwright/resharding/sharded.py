"""Sharded tensor: which devices hold which box of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Device
from trainwright.resharding.boxes import Box, elements

MeshAxes = tuple[int, ...]
"""Axes of a device mesh that split one dimension of a tensor, outermost first: () is the paper's R, (0, 1) its S01."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Box of a tensor and its holders, which are replicas of each other."""

    box: Box
    holders: tuple[Device, ...]


@dataclass(frozen=True)
class ShardedTensor:
    """Tensor cut into tiles: every element lies in one tile, and every device holds at most one."""

    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"a sharded tensor needs dimensions of at least 1, got shape {list(self.shape)}")
        for tile in self.tiles:
            fits = len(tile.box) == len(self.shape) and all(
                0 <= first < end <= size for (first, end), size in zip(tile.box, self.shape, strict=True)
            )
            if not fits:
                raise ValueError(
                    f"the tile {list(tile.box)} is empty or not inside a tensor of shape {list(self.shape)}"
                )
            if not tile.holders:
                raise ValueError(f"nobody holds the tile {list(tile.box)}")
        if len(set(self.devices)) < len(self.devices):
            twice = next(device for device in self.devices if self.devices.count(device) > 1)
            raise ValueError(f"device {twice} is named twice; it holds one tile")
        held = sum(elements(tile.box) for tile in self.tiles)
        if held != prod(self.shape) or any(len(self.overlapping_tiles(tile.box)) > 1 for tile in self.tiles):
            raise ValueError(f"the tiles must hold every value of a tensor of shape {list(self.shape)} exactly once")

    @classmethod
    def on_mesh(
        cls, shape: Sequence[int], devices: Sequence[Device], mesh: tuple[int, ...], spec: Sequence[MeshAxes]
    ) -> ShardedTensor:
        """Shard by Alpa's specs (§4.1): device i is at mesh position unravel(i), rows of the mesh first.

        Args:
            shape: of the tensor.
            devices: one per position of the mesh.
            mesh: (n0, n1), or any other number of axes.
            spec: the mesh axes that split each dimension of the tensor, into parts that differ by at most one index.

        Raises ValueError if the devices do not fill the mesh, an axis is unknown or splits two dimensions, or a
        dimension is shorter than its number of parts.
        """
        if prod(mesh) != len(devices):
            raise ValueError(f"a mesh of {list(mesh)} needs {prod(mesh)} devices, got {len(devices)}")
        used = [axis for axes in spec for axis in axes]
        if len(spec) != len(shape) or len(set(used)) < len(used) or not set(used) <= set(range(len(mesh))):
            raise ValueError(
                f"a spec of a tensor of {len(shape)} dimensions on a mesh of {len(mesh)} axes names for each dimension "
                f"axes that no other has, got {[list(axes) for axes in spec]}"
            )
        parts = [_even_parts(size, prod(mesh[axis] for axis in axes)) for size, axes in zip(shape, spec, strict=True)]
        held = []
        for device, place in zip(devices, product(*(range(size) for size in mesh)), strict=True):
            box = []
            for dimension, axes in zip(parts, spec, strict=True):
                number = 0
                for axis in axes:
                    number = number * mesh[axis] + place[axis]
                box.append(dimension[number])
            held.append((tuple(box), device))
        return cls.of(shape, held)

    @classmethod
    def in_rows(cls, rows: Sequence[int], width: int, holders: Sequence[tuple[Device, ...]]) -> ShardedTensor:
        """Cut a tensor [row, value] into intervals of `rows`, each held in full by every device of a group."""
        ends = (0, *accumulate(rows))
        tiles = (Tile((interval, (0, width)), group) for interval, group in zip(pairwise(ends), holders, strict=True))
        return cls((ends[-1], width), tuple(tiles))

    @classmethod
    def of(cls, shape: Sequence[int], held: Iterable[tuple[Box, Device]]) -> ShardedTensor:
        """Group the devices' boxes into tiles; devices with the same box are replicas."""
        holders: dict[Box, list[Device]] = {}
        for box, device in held:
            holders.setdefault(box, []).append(device)
        return cls(tuple(shape), tuple(Tile(box, tuple(found)) for box, found in holders.items()))

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All holders, tile by tile."""
        return tuple(device for tile in self.tiles for device in tile.holders)

    def overlapping_tiles(self, box: Box) -> list[int]:
        """Return the tiles that overlap a box, ascending."""
        firsts, ends = self._borders
        low, high = np.array(box).T
        return np.flatnonzero(((firsts < high) & (ends > low)).all(axis=1)).tolist()

    @cached_property
    def _borders(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """`[tile, dimension]` first indices and stop indices."""
        borders = np.array([tile.box for tile in self.tiles])
        return borders[:, :, 0], borders[:, :, 1]


def mesh_axes(words: str) -> tuple[MeshAxes, ...]:
    """Parse a sharding spec in the paper's notation, for example `S0 R S1` or `S01 R` (Table 1).

    Raises ValueError for anything else.
    """
    parts = words.split()
    if not parts or any(part != "R" and not (part[0] == "S" and part[1:].isdecimal()) for part in parts):
        raise ValueError(f"a sharding spec names R, S0, S1 or S01 for every dimension, got {words!r}")
    return tuple(() if part == "R" else tuple(int(axis) for axis in part[1:]) for part in parts)


def _even_parts(size: int, parts: int) -> list[tuple[int, int]]:
    if parts > size:
        raise ValueError(f"a dimension of {size} cannot be cut into {parts} parts")
    return list(pairwise(number * size // parts for number in range(parts + 1)))


def tile_overlaps(source: ShardedTensor, target: ShardedTensor) -> Iterator[tuple[int, int, Box]]:
    """Yield (source tile, target tile, intersection): the paper's first iteration (§6).

    Raises ValueError if the shapes differ.
    """
    if source.shape != target.shape:
        raise ValueError(
            f"a tensor keeps its shape when it is resharded, got {list(source.shape)} and {list(target.shape)}"
        )
    for number, tile in enumerate(source.tiles):
        for other in target.overlapping_tiles(tile.box):
            pairs = zip(tile.box, target.tiles[other].box, strict=True)
            yield number, other, tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)
