"""Partitions to begin with, and tables over all ranges of layers to find better ones in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.search.galvatron.balance import Partition, PartitionTables, best_partition, least_longest
from trainwright.search.galvatron.pipelines import Cut, Ends
from trainwright.search.galvatron.relaxed import StageOptions, memory_free, within_memory
from trainwright.search.galvatron.tables import GroupTables, StageTable
from trainwright.search.partition import even_split

Array = NDArray[np.float64]

_STEADY_ALONE = 1e6
"""A weight beside which the last micro-batch does not count."""


@dataclass(frozen=True)
class CutTables:
    """What the stages of a cut take with no regard to memory; small, and spread over all ranges only when asked.

    Weights are those of the cut, between 0 (the least last seconds) and one that leaves steady seconds alone.
    """

    cut: Cut

    def _tables(self) -> PartitionTables:
        bench, longest = self.cut.bench, _longest_range(self.cut)
        weights = (0.0, *self.cut.weights, _STEADY_ALONE)

        def options(group: GroupTables, _: list[StageTable]) -> StageOptions:
            return bench.once((id(group), weights, longest), lambda: memory_free(group, np.array(weights), longest))

        return _tables(self.cut, options)

    def quick_bound(self) -> float:
        """A bound of Eq. 8 without tables of ranges: every layer's fastest strategies, spread over stages in fractions.

        The longest stage is at least a mean of all stages, whatever their weights; slower ones weigh less.
        """
        sequence = self.cut.bench.sequence
        members = np.array(sequence.members(0, sequence.layers))
        steady, last = np.stack([[part.min(axis=1) for part in group.seconds] for group in self.cut.groups], axis=1)
        alone = steady[:, members].sum(axis=1)
        longest = 0.0
        if alone.all():  # else all of the model takes no time on some devices, and so may every stage
            share = 1 / alone
            longest = float((share[:, None] * steady[:, members]).min(axis=0).sum() / share.sum())
        return (self.cut.micro_batches - 1) * longest + float(last[:, members].min(axis=0).sum())

    @cached_property
    def lower_bound(self) -> float:
        """No assignment of the cut has a smaller Eq. 8: every stage's least steady and least last seconds."""
        tables = self._tables()
        least = replace(
            tables, steady_seconds=tables.steady_seconds[..., -1:], last_seconds=tables.last_seconds[..., :1]
        )
        found = best_partition(least, self.cut.micro_batches)
        return found.seconds if found else np.inf

    def best(self) -> Partition | None:
        """The partition with the least Eq. 8."""
        return best_partition(self._tables(), self.cut.micro_batches)

    def time_balanced(self) -> Ends | None:
        """p_t: the longest stage is least."""
        return least_longest(self._tables().steady_seconds[..., -1])


def fitting_partition(cut: Cut) -> Partition | None:
    """The best partition where every stage keeps to its memory, layers following two strategies in part."""
    weights = np.array(cut.weights)
    tables = _tables(cut, lambda _, stages: within_memory(stages, weights, _longest_range(cut)))
    return best_partition(tables, cut.micro_batches)


def even_partition(cut: Cut) -> Ends | None:
    """Equally many of the model's most frequent layers in every stage."""
    return even_split(cut.bench.problem.model, len(cut.devices))


def memory_balanced_partition(cut: Cut) -> Ends | None:
    """p_m: the fullest stage is least full, all layers under the first strategy that is open (DP, mostly)."""
    layers = cut.bench.sequence.layers
    members = np.array(cut.bench.sequence.members(0, layers))
    shares = []
    for stage in cut.stages:
        sums = np.concatenate(([0.0], np.cumsum(stage.forward_bytes[members, 0]))) / stage.group.budget_bytes
        held = sums[None, :] - sums[:, None]
        shares.append(np.where(np.arange(layers + 1)[None, :] > np.arange(layers + 1)[:, None], held, np.inf))
    return least_longest(np.stack(shares))


def _longest_range(cut: Cut) -> int:
    return cut.bench.sequence.layers - len(cut.devices) + 1


def _tables(cut: Cut, make: Callable[[GroupTables, list[StageTable]], StageOptions]) -> PartitionTables:
    """[stage, first, end, weight] steady and last seconds; stages of one group with one in-flight count share a row."""
    rows: dict[int, StageOptions] = {}
    places: dict[int, dict[int, int]] = {}
    for group in cut.groups:
        if id(group) in rows:
            continue
        kinds = {stage.in_flight: stage for stage in cut.stages if stage.group is group}
        rows[id(group)] = make(group, list(kinds.values()))
        places[id(group)] = {in_flight: number for number, in_flight in enumerate(kinds)}
    node = cut.bench.sequence.node
    steady: list[Array] = []
    last: list[Array] = []
    for stage in cut.stages:
        options, place = rows[id(stage.group)], places[id(stage.group)][stage.in_flight]
        place = min(place, len(options.steady_seconds) - 1)
        for found, table in ((steady, options.steady_seconds), (last, options.last_seconds)):
            found.append(np.where(node[..., None] >= 0, table[place][node], np.inf))
    return PartitionTables(np.stack(steady), np.stack(last), cut.exchange_seconds)
