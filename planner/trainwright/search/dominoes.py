"""Placements from domino tilings of the device mesh (AMP §6.3, Fig. 5)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainwright.search.degrees import Degrees, divisors
from trainwright.search.placement import Placement, megatron_placement

_STEPS_PER_DOMINO = 16
"""How long a tiling is looked for before Megatron's placement is taken."""

Domino = tuple[int, int, int, int]
"""First row, first column, rows, columns."""


def domino_placement(nodes: NDArray[np.intp], degrees: Degrees, generator: np.random.Generator) -> Placement:
    """A random placement: the devices as a mesh of nodes by slots, tiled by one domino for each stage.

    A domino is a rectangle of tmp × dp devices, lying or standing: any rectangle of that many cells. Nodes may have
    different numbers of devices: their rows end earlier. Stages follow the dominoes' first cells; inside a domino
    tensor ranks run along the rows first. Where no tiling is found, as Megatron places.

    Args:
        nodes: [device] number of the device's node; a node's devices are neighbours.
        degrees: their product is the number of devices.
        generator: what is drawn from.
    """
    _, widths = np.unique(np.cumsum(np.diff(nodes, prepend=nodes[0]) != 0), return_counts=True)
    dominoes = tiling(widths.tolist(), degrees.data * degrees.tensor, generator)
    if dominoes is None:
        return megatron_placement(degrees)
    numbers = np.zeros((len(widths), int(widths.max())), dtype=np.intp)
    numbers[np.arange(numbers.shape[1]) < widths[:, None]] = np.arange(len(nodes))
    members = [
        numbers[row : row + height, column : column + width].reshape(-1) for row, column, height, width in dominoes
    ]
    return np.stack(members).reshape(degrees.pipeline, degrees.data, degrees.tensor)


def tiling(widths: Sequence[int], size: int, generator: np.random.Generator) -> list[Domino] | None:
    """Dominoes of `size` cells that cover rows of these widths, in the order of their first cells; None if none is found.

    The first free cell takes a domino of a random shape that has room, and where none has, the domino before it is
    taken back.
    """
    free = np.arange(max(widths)) < np.array(widths)[:, None]
    shapes = [
        (rows, size // rows) for rows in divisors(size) if rows <= free.shape[0] and size // rows <= free.shape[1]
    ]
    count = sum(widths) // size
    dominoes: list[Domino] = []
    untried = [_shuffled(shapes, generator)]
    for _ in range(_STEPS_PER_DOMINO * count + 1):
        if len(dominoes) == count:
            return dominoes
        row, column = divmod(int(np.argmax(free)), free.shape[1])
        while untried[-1]:
            height, width = untried[-1].pop()
            cells = free[row : row + height, column : column + width]
            if cells.shape == (height, width) and cells.all():
                cells[:] = False
                dominoes.append((row, column, height, width))
                untried.append(_shuffled(shapes, generator))
                break
        else:
            untried.pop()
            if not dominoes:
                return None
            row, column, height, width = dominoes.pop()
            free[row : row + height, column : column + width] = True
    return None


def _shuffled(shapes: list[tuple[int, int]], generator: np.random.Generator) -> list[tuple[int, int]]:
    return [shapes[int(number)] for number in generator.permutation(len(shapes))]
