"""Drafts: solutions of the dynamic program as plans, with one or several pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from trainwright.plan import Pipeline, Plan, Stage, divisors
from trainwright.search.auto.budget import MEDIUM_CLUSTER_DEVICES, Resolution, SearchBudget
from trainwright.search.auto.computing import ComputeEstimate, tied_weight_sync_seconds
from trainwright.search.auto.device_lines import DeviceLine, device_lines
from trainwright.search.auto.layer_device_dp import LayerDeviceDP, StageSequence
from trainwright.search.auto.layer_rebalancing import LayerStrategy, StageConfig
from trainwright.search.auto.line_tables import LineOptions
from trainwright.search.auto.replica_sets import StageOption, rows_by_replica
from trainwright.search.auto.replica_tables import ReplicaTables
from trainwright.search.auto.stage_sites import LineInterval, StageSites
from trainwright.search.problem import Problem


def pipeline_of(sequence: StageSequence, line_options: LineOptions, micro_batches: int) -> Pipeline:
    """Convert the stage sequence into a pipeline."""
    stages = []
    count = len(sequence.intervals)
    for stage_index, interval in enumerate(sequence.intervals):
        stages.append(_build_stage(interval, line_options, min(count - stage_index, micro_batches)))
    return Pipeline(micro_batches, line_options.rows, tuple(stages))


def _build_stage(interval: LineInterval, line_options: LineOptions, remaining_stages: int) -> Stage:
    sites = line_options.sites
    site_number = int(sites.site_numbers[interval.first_block, interval.end_block])
    option, sharding, ratio = line_options.choose(
        site_number, (interval.first, interval.end), line_options.in_flight_level(remaining_stages)
    )
    cuts, line = sites.replica_tables.cuts, sites.line
    first, end = cuts[interval.first], cuts[interval.end]
    groups = sites.tensor_groups_of(interval.first_block, interval.end_block, option.strategy.tensor)
    recomputed = recomputed_layers(sites.replica_tables, option, range(first, end), ratio)
    rows = rows_by_replica(groups, option.row_splits)
    kept, again = (
        LayerStrategy(rows, option.strategy.replace(sharding=sharding, recompute=recompute))
        for recompute in (False, True)
    )
    layers = tuple(again if layer in recomputed else kept for layer in range(first, end))
    devices = line.devices[line.block_bounds[interval.first_block] : line.block_bounds[interval.end_block]]
    return StageConfig(devices, layers).to_stage(first)


def recomputed_layers(replica_tables: ReplicaTables, option: StageOption, layers: range, ratio: float) -> set[int]:
    """Choose layers to recompute until `ratio` of the bytes is saved, most bytes per second first."""
    if ratio <= 0:
        return set()
    group, share = next(iter(option.row_splits.items()))
    seconds, saved_bytes = replica_tables.recompute_costs(group, share.largest)
    saved_bytes_per_second = (saved_bytes / np.maximum(seconds, 1e-30)).tolist()
    order = sorted(layers, key=lambda layer: (-saved_bytes_per_second[layer], layer))
    required_bytes = ratio * float(np.sum(saved_bytes[layers.start : layers.stop])) * (1 - 1e-9)
    chosen: set[int] = set()
    total_saved = 0.0
    for layer in order:
        if total_saved >= required_bytes or saved_bytes[layer] <= 0:
            break
        chosen.add(layer)
        total_saved += saved_bytes[layer]
    return chosen


MAX_KINDS = 4
"""Maximum node kinds for which every set partition is tried; above it, only all together and all separate."""
MAX_SEQUENCES_EACH = 4
"""Maximum stage sequences per pipeline that are combined."""


@dataclass(frozen=True)
class BatchShare:
    """Stage sequence that serves as one of several pipelines."""

    sequence: StageSequence
    line_options: LineOptions

    def seconds(self, micro_batches: int) -> float:
        return self.sequence.seconds(micro_batches)

    def micro_batches_within(self, seconds: float) -> int:
        """Return how many micro-batches, at least one, the pipeline finishes within `seconds`."""
        remaining_seconds = seconds - self.sequence.fill_and_drain_seconds
        return (
            max(int(remaining_seconds / self.sequence.bottleneck_seconds) + 1, 1)
            if self.sequence.bottleneck_seconds > 0
            else 1
        )


@dataclass
class MultiPipelineDrafts:
    """Drafts of several pipelines, each on some node kinds of one line."""

    replica_tables: ReplicaTables
    line: DeviceLine

    def drafts(self) -> list[tuple[float, Plan]]:
        """Return the best (DP seconds, plan) pairs, fastest first."""
        problem = self.replica_tables.problem
        ranked: list[tuple[float, int, tuple[BatchShare, ...], list[int]]] = []
        shares_by_kinds: dict[frozenset[int], list[BatchShare]] = {}
        for groups in set_partitions(sorted(set(self.line.kind_numbers))):
            if len(groups) == 1:
                continue
            for group in groups:
                if group not in shares_by_kinds:
                    shares_by_kinds[group] = self._shares_of_kinds(group)
            for combination in product(*(shares_by_kinds[group] for group in groups)):
                counts = balance_micro_batches(combination, problem.global_batch_size)
                if counts is not None:
                    seconds = max(part.seconds(count) for part, count in zip(combination, counts, strict=True))
                    ranked.append((seconds, len(ranked), combination, counts))
        ranked.sort(key=lambda item: item[:2])
        return [(seconds, self._plan(parts, counts)) for seconds, _, parts, counts in ranked[:MAX_SEQUENCES_EACH]]

    def _shares_of_kinds(self, group: frozenset[int]) -> list[BatchShare]:
        """Return the fastest stage sequences on these node kinds, one per micro-batch size."""
        batch = self.replica_tables.problem.global_batch_size
        sites = StageSites(self.replica_tables, self.line.with_kinds(group))
        shares = []
        for rows in divisors(batch):
            if rows <= batch // 2:
                (tables,) = LineOptions.for_lines([sites], rows, max(batch // rows // 2, 1))
                shares += [BatchShare(chain, tables) for chain in LayerDeviceDP(tables).sequences()[:1]]
        # The pipeline's share is not known yet: half of the batch stands for it.
        return sorted(shares, key=lambda part: part.seconds(max(batch // 2 // part.line_options.rows, 1)))[
            :MAX_SEQUENCES_EACH
        ]

    def _plan(self, shares: Sequence[BatchShare], counts: Sequence[int]) -> Plan:
        problem = self.replica_tables.problem
        pipelines: tuple[Pipeline, ...] = tuple(
            pipeline_of(part.sequence, part.line_options, count) for part, count in zip(shares, counts, strict=True)
        )
        return Plan(len(problem.model.layers), problem.global_batch_size, pipelines)


def balance_micro_batches(shares: Sequence[BatchShare], batch: int) -> list[int] | None:
    """Return micro-batch counts that minimise the last pipeline's end; None if no counts cover the batch exactly."""
    sizes = [part.line_options.rows for part in shares]
    if sum(sizes) > batch:
        return None
    low, high = 0.0, max(part.seconds(-(-batch // part.line_options.rows)) for part in shares)
    for _ in range(40):
        candidate_seconds = (low + high) / 2
        if (
            sum(part.micro_batches_within(candidate_seconds) * size for part, size in zip(shares, sizes, strict=True))
            >= batch
        ):
            high = candidate_seconds
        else:
            low = candidate_seconds
    counts = [part.micro_batches_within(high) for part in shares]
    excess = sum(count * size for count, size in zip(counts, sizes, strict=True)) - batch
    for number in sorted(range(len(shares)), key=lambda number: -sizes[number]):
        taken = min(max(excess, 0) // sizes[number], counts[number] - 1)
        counts[number] -= taken
        excess -= taken * sizes[number]
    if excess == 0:
        return counts
    # The excess is less than a micro-batch: trade one large micro-batch for several small ones.
    for number, size in enumerate(sizes):
        for other, unit in enumerate(sizes):
            missing_rows = size - excess
            if other != number and counts[number] > 1 and missing_rows >= 0 and missing_rows % unit == 0:
                counts[number] -= 1
                counts[other] += missing_rows // unit
                return counts
    return None


def set_partitions(items: Sequence[int]) -> Iterator[list[frozenset[int]]]:
    """Yield every partition of the items into groups; above `MAX_KINDS` items only the coarsest and the finest."""
    if len(items) > MAX_KINDS:
        yield [frozenset(items)]
        yield [frozenset({item}) for item in items]
    elif not items:
        yield []
    else:
        for rest in set_partitions(items[1:]):
            yield [frozenset({items[0]}), *rest]
            for number, group in enumerate(rest):
                yield [*rest[:number], group | {items[0]}, *rest[number + 1 :]]


MIN_TIED_SYNC_RATIO = 0.1
"""Minimum ratio of tied-weight sync to the compute estimate for which shared ends are tried on large clusters."""

Draft = tuple[float, Plan]
"""(iteration seconds by the DP, plan)."""


@dataclass(frozen=True)
class DraftGenerator:
    """Generator of DP drafts for one problem.

    Attributes:
        includes_multi_pipeline: also draft several pipelines, over all micro-batch sizes.
    """

    problem: Problem
    budget: SearchBudget
    includes_multi_pipeline: bool = True

    def steps(self, sizes: Sequence[int]) -> Iterator[tuple[list[Draft], float]]:
        """Yield the drafts of each DP run, best first, and the share of lines searched.

        Coarse drafts of all lines and sizes come first, then several pipelines, then fine drafts of the best choices.
        """
        budget = self.budget
        coarse = budget.coarse
        replica_tables = ReplicaTables(self.problem, coarse.layer_cuts)
        coarse_results: list[tuple[float, int, int]] = []
        coarse_lines = self._lines(coarse)
        nearby_sizes: list[int] = []
        for number, line in enumerate(coarse_lines):
            sites = StageSites(replica_tables, line, budget.max_tensor_degree)
            best_by_size: dict[int, float] = {}
            order = _middle_out(best_by_size, len(sizes), budget.patience, from_first=budget.starts_with_smallest)
            if budget.reuses_best_sizes and number and nearby_sizes:
                order = iter(sorted({*nearby_sizes, len(sizes) - 1}))
            for index in order:
                (line_options,) = self._line_options([sites], sizes[index])
                drafts = self._drafts(line_options, is_coarse=True)
                best_by_size[index] = drafts[0][0] if drafts else float("inf")
                coarse_results += [(seconds, number, sizes[index]) for seconds, _ in drafts[:1]]
                yield drafts, number / len(coarse_lines)
            best = min(best_by_size, key=lambda index: best_by_size[index])
            nearby_sizes = nearby_sizes or [index for index in (best - 1, best, best + 1) if 0 <= index < len(sizes)]
        if self.includes_multi_pipeline and len(set(coarse_lines[0].kind_numbers)) > 1:
            yield MultiPipelineDrafts(replica_tables, coarse_lines[0]).drafts(), 1.0
        refined = [(number, rows) for _, number, rows in sorted(coarse_results)[: budget.refined_choices]]
        for fine in budget.fine:
            for line_options in self._fine_options(replica_tables.with_max_cuts(fine.layer_cuts), fine, refined):
                yield self._drafts(line_options), 1.0

    def _fine_options(
        self, replica_tables: ReplicaTables, fine: Resolution, chosen: Sequence[tuple[int, int]]
    ) -> Iterator[LineOptions]:
        """Yield tables of the chosen (line number, rows) pairs; lines with equal rows share theirs."""
        line_of = dict(enumerate(self._lines(fine)))
        chosen = [(number, rows) for number, rows in chosen if number in line_of]
        sites = {
            number: StageSites(replica_tables, line_of[number], self.budget.max_tensor_degree) for number, _ in chosen
        }
        options_of: dict[tuple[int, int], LineOptions] = {}
        for number, rows in chosen:
            if (number, rows) not in options_of:
                same_size = [other for other, size in chosen if size == rows]
                tables = self._line_options([sites[other] for other in same_size], rows)
                options_of.update(zip(((other, rows) for other in same_size), tables, strict=True))
            yield options_of[number, rows]

    def _lines(self, resolution: Resolution) -> list[DeviceLine]:
        return device_lines(
            self.problem,
            resolution.blocks,
            resolution.kind_orders,
            self._max_shared_end_lines,
            self.budget.striped_lines,
        )

    @cached_property
    def _max_shared_end_lines(self) -> int:
        """Return the number of lines with shared ends; on large clusters 0 unless tied-weight sync matters."""
        problem = self.problem
        if len(problem.devices) <= MEDIUM_CLUSTER_DEVICES:
            return self.budget.shared_end_lines
        pays = tied_weight_sync_seconds(problem) > MIN_TIED_SYNC_RATIO * ComputeEstimate(problem).cluster_seconds
        return self.budget.shared_end_lines if pays else 0

    def _line_options(self, sites: Sequence[StageSites], rows: int) -> list[LineOptions]:
        return LineOptions.for_lines(sites, rows, self.problem.global_batch_size // rows)

    def _drafts(self, line_options: LineOptions, *, is_coarse: bool = False) -> list[Draft]:
        problem, micro_batches = self.problem, line_options.micro_batches
        drafts = []
        for sequence in LayerDeviceDP(line_options, is_coarse).sequences():
            pipeline = pipeline_of(sequence, line_options, micro_batches)
            plan = Plan(len(problem.model.layers), problem.global_batch_size, (pipeline,))
            drafts.append((sequence.seconds(micro_batches), plan))
        return drafts


def _middle_out(best_by_size: dict[int, float], count: int, patience: int, *, from_first: bool) -> Iterator[int]:
    """Yield indices outwards from the middle (or first), stopping each way after `patience` results worse than the best."""
    start = 0 if from_first else count // 2
    yield start
    for direction in (1, -1):
        index, worse_in_a_row = start + direction, 0
        while 0 <= index < count and worse_in_a_row < patience:
            best = min(best_by_size.values())
            yield index
            worse_in_a_row = 0 if best_by_size[index] < best or best == float("inf") else worse_in_a_row + 1
            index += direction
    # One micro-batch is a special case: no pipeline to fill, and gradients stay sharded.
    yield from (index for index in range(max(count - 2, 0), count) if index not in best_by_size)
