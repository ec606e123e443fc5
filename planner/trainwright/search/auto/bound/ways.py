"""What a layer costs a replica by its way, and how many devices of each accelerator a stage may have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.options import NEVER, Array
from trainwright.search.auto.bound.terms import Terms

Counts = NDArray[np.intp]
_SHAPES_KEPT = 64


@dataclass(frozen=True)
class Ways:
    """What one layer costs a replica, by way: a tensor degree, and whether all groups of the stage cross nodes.

    Where not all of them do, each replica has the better of both.

    Attributes:
        degrees, crosses: [way].
        forward, backward: [way, accelerator, rows - 1, kind] seconds; beyond reason where a way does not exist.
        activation: [way, accelerator, rows - 1, kind] bytes.
        update: [way, accelerator, kind] least seconds of the optimizer for a layer that is not sharded.
        updated: [kind] the least share of them where a stage holds a weight that several of its layers share.
    """

    degrees: tuple[int, ...]
    crosses: tuple[bool, ...]
    forward: Array
    backward: Array
    activation: Array
    update: Array
    updated: Array

    @classmethod
    def of(cls, terms: Terms, rows: int) -> Ways:
        """From exact options, for up to so many rows."""
        options = terms.options
        heads = [
            (one, crosses) for one in sorted(set(options.tensor.tolist())) for crosses in (False, True)[: 1 + (one > 1)]
        ]
        degrees, crossing = tuple(one for one, _ in heads), tuple(crosses for _, crosses in heads)
        shape = (len(degrees), len(options.accelerators), rows, options.forward.shape[1])
        forward, backward, activation = (np.full(shape, NEVER) for _ in range(3))
        update = np.full((*shape[:2], shape[3]), NEVER)
        for way, degree in enumerate(degrees):
            for number in range(len(options.accelerators)):
                for crosses in (False, True)[crossing[way] :]:
                    mine = (options.tensor == degree) & (options.accelerator == number) & (options.crosses == crosses)
                    if not mine.any():
                        continue
                    for table, source in (
                        (forward, options.forward),
                        (backward, options.backward),
                        (activation, options.activation),
                    ):
                        table[way, number] = np.minimum(table[way, number], source[mine])
                    update[way, number] = np.minimum(update[way, number], options.update[mine].min(axis=0))
        updated = np.ones(shape[3])
        for way, degree in enumerate(degrees):
            for seconds in update[way]:
                own, share = terms.updated_once(degree, np.where(seconds < NEVER, seconds, 0.0))
                updated = np.minimum(updated, own * share)
        return cls(degrees, crossing, forward, backward, activation, update, updated)


def stage_counts(most: tuple[int, ...]) -> Counts:
    """[stage, accelerator] all numbers of devices that a stage may have, none left out."""
    every = product(*(range(one + 1) for one in most))
    return np.array([one for one in every if any(one)], dtype=np.intp)


Part = tuple[slice, ...]


@lru_cache(maxsize=_SHAPES_KEPT)
def stages_in(most: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, Part, Part]]:
    """Stages with no more devices than the `shape` has: number, what devices may be used beside it, and what with it.

    Both are parts of tables [devices of each accelerator …]. Stages are numbered as those of all devices, `most`.
    """
    counts = stage_counts(most)
    found = []
    for number in np.flatnonzero((counts <= np.array(shape)).all(axis=1)).tolist():
        mine = counts[number].tolist()
        beside = tuple(slice(0, have + 1 - one) for one, have in zip(mine, shape, strict=True))
        found.append((number, beside, tuple(slice(one, None) for one in mine)))
    return found
