"""The stages that the programme may choose from: spans of layers on submeshes, each by its best options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trainwright.search.spans import Array

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Edges:
    """One entry for every (span of clusters, berth, option) that no other option of the same span and berth beats.

    Attributes:
        first, end: boundaries of clusters.
        size: devices.
        low, high: the least and the largest number of devices that the stages before it may use together.
        seconds: t_intra of one micro-batch.
        most_stages: how many stages, this one included, may follow for it to fit (Eq. 5).
        copies: of every message into it that cross one link.
        berth, option: what it stands for.
    """

    first: Indices
    end: Indices
    size: Indices
    low: Indices
    high: Indices
    seconds: Array
    most_stages: Indices
    copies: Array
    berth: Indices
    option: Indices

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> Edges:
        return Edges(
            self.first[chosen],
            self.end[chosen],
            self.size[chosen],
            self.low[chosen],
            self.high[chosen],
            self.seconds[chosen],
            self.most_stages[chosen],
            self.copies[chosen],
            self.berth[chosen],
            self.option[chosen],
        )

    def at(self, low: int, high: int, berth: int) -> Edges:
        """The same stages in another place of the pipeline."""
        like = np.ones_like(self.first)
        return replace(self, low=low * like, high=high * like, berth=berth * like)


def edges_of(seconds: Array, most_stages: Indices, size: int, copies: Array | None = None) -> Edges:
    """The options [option, first, end] of one submesh that are on the front of time and memory.

    `copies` are by option; 1 of each where they are not given.
    """
    order = np.argsort(seconds, axis=0, kind="stable")
    ascending = np.take_along_axis(most_stages, order, axis=0)
    before = np.zeros_like(ascending)
    np.maximum.accumulate(ascending[:-1], axis=0, out=before[1:])
    kept, first, end = np.nonzero(ascending > before)
    option = order[kept, first, end]
    nothing = np.zeros(len(first), dtype=np.int64)
    return Edges(
        first=first.astype(np.int64),
        end=end.astype(np.int64),
        size=nothing + size,
        low=nothing,
        high=nothing,
        seconds=seconds[option, first, end],
        most_stages=most_stages[option, first, end],
        copies=np.ones(len(first)) if copies is None else copies[option],
        berth=nothing,
        option=option.astype(np.int64),
    )


def together(several: Sequence[Edges]) -> Edges:
    """All of them, by their first boundary."""
    found = Edges(
        np.concatenate([one.first for one in several]),
        np.concatenate([one.end for one in several]),
        np.concatenate([one.size for one in several]),
        np.concatenate([one.low for one in several]),
        np.concatenate([one.high for one in several]),
        np.concatenate([one.seconds for one in several]),
        np.concatenate([one.most_stages for one in several]),
        np.concatenate([one.copies for one in several]),
        np.concatenate([one.berth for one in several]),
        np.concatenate([one.option for one in several]),
    )
    return found[np.argsort(found.first, kind="stable")]
