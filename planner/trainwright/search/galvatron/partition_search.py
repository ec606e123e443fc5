"""Initial partitions, and their adjustment towards the time-balanced one (Algorithm 2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainwright.cost.layer_sums import Array, prefix_sums, span_sums
from trainwright.cost.time_terms import pipeline_seconds
from trainwright.search.galvatron.balanced_partition import (
    Partition,
    PartitionTables,
    best_partition,
    min_max_partition,
    neighbours,
)
from trainwright.search.galvatron.pipeline_solutions import PipelineSolution, PipelineSplit, StageEnds
from trainwright.search.galvatron.relaxed_tables import (
    RelaxedStageOptions,
    memory_limited_options,
    memory_unlimited_options,
)
from trainwright.search.galvatron.strategy_tables import GroupTables, StageTable
from trainwright.search.uniform.layer_partition import even_split

_ROUNDING = 1e-12


def adjust_partitions(
    cut: PipelineSplit, memory_balanced: StageEnds, time_balanced: StageEnds | None
) -> Iterator[PipelineSolution]:
    """Yield solutions of Algorithm 2's queue, where the slowest stage gives a boundary layer to a neighbour.

    A new partition is queued if (1) no stage takes longer than the slowest did, (2) all fit in memory and (3) none
    needs more memory than the fullest stage under p_t.
    """
    fullest = _max_stage_bytes(cut.solution(time_balanced) if time_balanced else None)
    queue, seen = deque([memory_balanced]), {memory_balanced}
    while queue:
        solution = cut.solution(queue.popleft())
        if solution is None:
            continue
        yield solution
        for ends in _shrink_slowest(solution):
            if ends in seen:
                continue
            seen.add(ends)
            new = cut.solution(ends)
            if new is not None and _is_valid(new, solution, fullest):
                queue.append(ends)


def _slowest(solution: PipelineSolution) -> int:
    seconds = [stage.steady_seconds for stage in solution.stages]
    return seconds.index(max(seconds))


def _shrink_slowest(solution: PipelineSolution) -> list[StageEnds]:
    """Return partitions in which the slowest stage has one layer less."""
    slowest = _slowest(solution)
    layer_counts = _layer_counts(solution.ends)
    return [ends for ends in neighbours(solution.ends) if _layer_counts(ends)[slowest] < layer_counts[slowest]]


def _layer_counts(ends: StageEnds) -> list[int]:
    return [end - first for first, end in zip((0, *ends), ends, strict=False)]


def _max_stage_bytes(solution: PipelineSolution | None) -> float | None:
    return max(stage.bytes for stage in solution.stages) if solution else None


def _is_valid(new: PipelineSolution, old: PipelineSolution, fullest: float | None) -> bool:
    longest = max(stage.steady_seconds for stage in old.stages)
    return all(stage.steady_seconds <= longest * (1 + _ROUNDING) for stage in new.stages) and (
        fullest is None or all(stage.bytes <= fullest for stage in new.stages)
    )


def descend_partitions(cut: PipelineSplit, start: PipelineSolution, steps: int) -> PipelineSolution:
    """Move single boundary layers while Eq. 8 falls, at most `steps` times, and return the best partition."""
    best = start
    for _ in range(steps):
        tried = [solution for ends in neighbours(best.ends) if (solution := cut.solution(ends)) is not None]
        better = min(tried, key=lambda solution: solution.seconds, default=best)
        if better.seconds >= best.seconds * (1 - _ROUNDING):
            break
        best = better
    return best


_ALL, _FIRST, _LAST = slice(None), slice(1), slice(-1, None)
"""Weights whose tables are built."""
_STEADY_ALONE = 1e6
"""Weight of steady micro-batches that makes the last one negligible."""


@dataclass(frozen=True)
class SplitTables:
    """Stage costs of a pipeline split without memory limits, expanded to all ranges only on demand.

    Weights range from 0, which minimises last seconds, to one that minimises steady seconds alone.
    """

    split: PipelineSplit

    def _partition_tables(self, steady_weights: slice = _ALL, last_weights: slice = _ALL) -> PartitionTables:
        bench, longest = self.split.cache, _longest_range(self.split)
        weights = (0.0, *self.split.steady_weights, _STEADY_ALONE)

        def options(group: GroupTables, _: list[StageTable]) -> RelaxedStageOptions:
            return bench.cached_options(
                (id(group), weights, longest), lambda: memory_unlimited_options(group, np.array(weights), longest)
            )

        return _partition_tables_of(self.split, options, steady_weights, last_weights)

    def quick_bound(self) -> float:
        """Return a lower bound on Eq. 8 without range tables, splitting layers fractionally over stages.

        Each layer takes its fastest strategies. The longest stage is at least any weighted mean of all stages; slower
        ones get less weight.
        """
        sequence = self.split.cache.sequence
        members = np.array(sequence.range_classes(0, sequence.layers))
        steady, last = np.stack([[part.min(axis=1) for part in group.seconds] for group in self.split.groups], axis=1)
        alone = steady[:, members].sum(axis=1)
        longest = 0.0
        if alone.all():  # else some devices run the whole model in no time, so 0 is the only bound
            share = 1 / alone
            longest = float((share[:, None] * steady[:, members]).min(axis=0).sum() / share.sum())
        return pipeline_seconds(float(last[:, members].min(axis=0).sum()), longest, self.split.micro_batches)

    @cached_property
    def lower_bound(self) -> float:
        """Return a lower bound on Eq. 8 of the split, from every stage's least steady and least last seconds."""
        partition = best_partition(self._partition_tables(_LAST, _FIRST), self.split.micro_batches)
        return partition.seconds if partition else np.inf

    def best(self) -> Partition | None:
        """Return the partition of least Eq. 8."""
        return best_partition(self._partition_tables(), self.split.micro_batches)

    def time_balanced(self) -> StageEnds | None:
        """Return p_t, the partition whose longest stage is shortest."""
        return min_max_partition(self._partition_tables(_LAST, _FIRST).steady_seconds[..., -1])


def fitting_partition(cut: PipelineSplit) -> Partition | None:
    """Return the best partition under relaxed memory limits, where a layer may mix two strategies."""
    weights = np.array(cut.steady_weights)
    tables = _partition_tables_of(cut, lambda _, stages: memory_limited_options(stages, weights, _longest_range(cut)))
    return best_partition(tables, cut.micro_batches)


def even_partition(cut: PipelineSplit) -> StageEnds | None:
    """Return the partition with equal numbers of blocks per stage."""
    return even_split(cut.cache.problem.model, len(cut.devices))


def memory_balanced_partition(cut: PipelineSplit) -> StageEnds | None:
    """Return p_m, the partition whose fullest stage is least full, with the first allowed strategy (mostly DP) everywhere."""
    layers = cut.cache.sequence.layers
    members = np.array(cut.cache.sequence.range_classes(0, layers))
    shares = []
    for stage in cut.stages:
        shares_of_budget = span_sums(prefix_sums(stage.forward_bytes[members, 0]) / stage.group.budget_bytes)
        shares.append(
            np.where(np.arange(layers + 1)[None, :] > np.arange(layers + 1)[:, None], shares_of_budget, np.inf)
        )
    return min_max_partition(np.stack(shares))


def _longest_range(cut: PipelineSplit) -> int:
    return cut.cache.sequence.layers - len(cut.devices) + 1


def _partition_tables_of(
    cut: PipelineSplit,
    make: Callable[[GroupTables, list[StageTable]], RelaxedStageOptions],
    steady_weights: slice = _ALL,
    last_weights: slice = _ALL,
) -> PartitionTables:
    """Build `[stage, first, end, weight]` steady and last seconds of these weights.

    Stages of equal group and in-flight count share a row.
    """
    rows: dict[int, RelaxedStageOptions] = {}
    places: dict[int, dict[float, int]] = {}
    for group in cut.groups:
        if id(group) in rows:
            continue
        kinds = {stage.in_flight: stage for stage in cut.stages if stage.group is group}
        rows[id(group)] = make(group, list(kinds.values()))
        places[id(group)] = {in_flight: number for number, in_flight in enumerate(kinds)}
    # Empty ranges have number -1, which is that of the row appended.
    numbers = cut.cache.sequence.range_number
    padded = {
        key: [
            np.pad(table, ((0, 0), (0, 1), (0, 0)), constant_values=np.inf)
            for table in (options.steady_seconds[..., steady_weights], options.last_seconds[..., last_weights])
        ]
        for key, options in rows.items()
    }
    steady: list[Array] = []
    last: list[Array] = []
    for stage in cut.stages:
        tables, place = padded[id(stage.group)], places[id(stage.group)][stage.in_flight]
        place = min(place, len(tables[0]) - 1)
        for tables_of_stages, table in zip((steady, last), tables, strict=True):
            tables_of_stages.append(table[place][numbers])
    return PartitionTables(np.stack(steady), np.stack(last), cut.exchange_seconds)
