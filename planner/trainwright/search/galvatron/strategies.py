"""Which strategies a layer may take on the devices of a stage: the leaves of Galvatron's decision trees (§III-B)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import permutations
from math import prod

from trainwright.plan import LayerRun, Order, Sharding, even_rows


class Paradigm(StrEnum):
    """What a level of a decision tree divides the devices by."""

    DATA = "dp"
    SHARDED = "sdp"
    TENSOR = "tp"


Level = tuple[Paradigm, int]
"""A paradigm and its degree."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One decision tree (S_j): its levels from the root down, and whether the layer is recomputed (CKPT).

    The last level divides neighbouring devices. No paradigm is on two levels.
    """

    levels: tuple[Level, ...]
    recompute: bool = False

    @property
    def tensor(self) -> int:
        return prod(degree for paradigm, degree in self.levels if paradigm is Paradigm.TENSOR)

    @property
    def data(self) -> int:
        return prod(degree for paradigm, degree in self.levels if paradigm is not Paradigm.TENSOR)

    @property
    def sharding(self) -> Sharding:
        sharded = any(paradigm is Paradigm.SHARDED for paradigm, _ in self.levels)
        return Sharding.ZERO3 if sharded else Sharding.NONE

    @property
    def order(self) -> Order:
        data_inner = len(self.levels) > 1 and self.levels[-1][0] is not Paradigm.TENSOR
        return Order.DATA_INNER if data_inner else Order.TENSOR_INNER

    def layer_run(self, first: int, count: int, micro_batch_size: int) -> LayerRun:
        """Layers that follow the strategy. Rows are spread as evenly as they can be, the first replicas take one more.

        Raises ValueError where there are fewer rows than replicas.
        """
        rows = even_rows(micro_batch_size, self.data)
        return LayerRun(first, count, self.tensor, self.data, rows, self.order, self.sharding, self.recompute)


def trees(devices: int, *, mixing_data_and_sharded: bool = False) -> tuple[tuple[Level, ...], ...]:
    """The levels of every decision tree over so many devices, without regard to CKPT.

    Degrees are any divisors above 1; on powers of two they are the paper's {2, 4, 8, …}. Trees with both DP and SDP,
    which takeaway #3 leaves out, are there only when asked for.
    """
    found: list[tuple[Level, ...]] = []
    for height in range(len(Paradigm) + 1):
        for paradigms in permutations(Paradigm, height):
            if not mixing_data_and_sharded and {Paradigm.DATA, Paradigm.SHARDED} <= set(paradigms):
                continue
            found += [tuple(zip(paradigms, degrees, strict=True)) for degrees in _factors(devices, height)]
    return tuple(found)


def strategies(devices: int, *, recompute: bool = True, mixing_data_and_sharded: bool = False) -> tuple[Strategy, ...]:
    """All strategies for a stage of so many devices, those with CKPT behind those without."""
    levels = trees(devices, mixing_data_and_sharded=mixing_data_and_sharded)
    choices = (False, True) if recompute else (False,)
    return tuple(Strategy(tree, choice) for choice in choices for tree in levels)


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorisations of a number into so many factors above 1."""
    if count == 0:
        if number == 1:
            yield ()
        return
    for factor in range(2, number + 1):
        if number % factor == 0:
            for rest in _factors(number // factor, count - 1):
                yield (factor, *rest)
