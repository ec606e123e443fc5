"""Gradient reductions after the last backward: unsharded buckets, sharded buckets, tied weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from trainwright.cost.collectives import Collective, Nodes
from trainwright.cost.messages import message_count, weight_tensors
from trainwright.cost.network import Load, Nic
from trainwright.cost.operators.shared_weights import largest_shared_weight
from trainwright.cost.operators.stage_costs import operator_stage_costs
from trainwright.cost.plan_layout import StageKey
from trainwright.cost.stage_times import PlanTimes
from trainwright.cost.tied_weights import TiedWeightOwner, have_same_data_groups
from trainwright.plan import LayerRun, Stage
from trainwright.rank_layout import RankLayout, slice_count, slice_holders, slices_per_member
from trainwright.strategy import Sharding

ReductionCost = tuple[float, float, Load]
"""Seconds, the latency included in them, and the busy seconds of every NIC."""


@dataclass(frozen=True, slots=True)
class GradientReduction:
    """Reduction of gradients that starts when its owners' workers and its predecessors have ended.

    Attributes:
        stages: stages whose ranks take part.
        predecessors: numbers of the reductions that some of these ranks run before.
        seconds: duration without other reductions; 0 if it overlaps the last backward, since `StageEnd` then has its end.
        latency_seconds: part of `seconds` that does not depend on bandwidth.
        nic_seconds: busy seconds of every NIC.
        is_tied_weight: whether it reduces a tied weight separately.
    """

    stages: tuple[StageKey, ...]
    predecessors: tuple[int, ...]
    seconds: float
    latency_seconds: float
    nic_seconds: Mapping[Nic, float] = field(default_factory=dict)
    is_tied_weight: bool = False
    overlaps_backward: bool = False


@dataclass(frozen=True)
class BucketOwner:
    """Ranks of one pipeline that own the layers of a bucket, and their layer run."""

    key: StageKey
    number: int
    run: LayerRun
    layout: RankLayout[str]

    @property
    def bucket_key(self) -> tuple[object, ...]:
        """Key that layers of one bucket share."""
        return self.key, self.layout.arrangement, self.run.strategy.sharding


@dataclass(frozen=True)
class Bucket:
    """Layers with the same owners in every pipeline: their gradients are one message.

    Attributes:
        values: parameters on one rank, by owner.
        tensors: number of tensors that hold them.
        is_reduce_scattered: whether each pipeline first reduce-scatters among its replicas; pipelines that split the weights
            differently reduce them unsharded.
    """

    holders: tuple[BucketOwner, ...]
    values: tuple[int, ...]
    tensors: int
    is_reduce_scattered: bool


def buckets(plan_times: PlanTimes) -> tuple[Bucket, ...]:
    """Return the buckets of a plan, without tied weights that are reduced separately."""
    by_layer = [_by_first_layer(index, plan_times) for index in range(len(plan_times.plan.pipelines))]
    cuts = sorted({first for runs in by_layer for first in runs} | {len(plan_times.context.model.layers)})
    current: list[BucketOwner] = []
    bucket_of: dict[tuple[object, ...], Bucket] = {}
    for first, end in pairwise(cuts):
        current = [runs.get(first) or current[index] for index, runs in enumerate(by_layer)]
        values = tuple(_values(holder.run, first, end, plan_times) for holder in current)
        tensors = weight_tensors(plan_times.context, first, end)
        name = tuple(holder.bucket_key for holder in current)
        if name in bucket_of:
            values = tuple(a + b for a, b in zip(bucket_of[name].values, values, strict=True))
            tensors += bucket_of[name].tensors
        is_scattered = (
            first not in plan_times.mixed_sharding_layers and current[0].run.strategy.sharding is not Sharding.NONE
        )
        bucket_of[name] = Bucket(tuple(current), values, tensors, is_scattered)
    return tuple(bucket_of.values())


def _by_first_layer(index: int, plan_times: PlanTimes) -> dict[int, BucketOwner]:
    return {
        run.first: BucketOwner((index, number), place, run, plan_times.layouts[index, number][place])
        for number, stage in enumerate(plan_times.plan.pipelines[index].stages)
        for place, run in enumerate(stage.layers)
    }


def _values(run: LayerRun, first: int, end: int, plan_times: PlanTimes) -> int:
    """Return the parameters of a run's layers on one rank: each tied weight once, none if it is reduced separately."""
    context, divided = plan_times.context, plan_times.context.divided_by(run.strategy)
    total = 0
    for kind, count in context.kind_counts(first, end):
        total += count * divided.trained_parameters(kind)
        name = kind.shared_weight
        if name is not None:
            is_first = (
                name not in plan_times.reduced_separately and first <= context.first_layer_with_tied_weight[name] < end
            )
            total -= (
                count - (is_first and context.model.kind_of(context.first_layer_with_tied_weight[name]) is kind)
            ) * divided.tied_parameters(kind)
    return total


def gradient_reductions(plan_times: PlanTimes) -> tuple[GradientReduction, ...]:
    """Return all reductions that end after the last backward, in the order in which ranks run them."""
    return _ReductionBuilder(plan_times).build()


class _ReductionBuilder:
    def __init__(self, plan_times: PlanTimes) -> None:
        self.plan_times, self.context = plan_times, plan_times.context
        self.reductions: list[GradientReduction] = []
        self.last_reduction_of_stage: dict[StageKey, tuple[int, ...]] = {}

    def build(self) -> tuple[GradientReduction, ...]:
        self._add_overlapped()
        self._add_operators()
        for bucket in buckets(self.plan_times):
            if all(self.plan_times.stages[holder.key].stage.operators is None for holder in bucket.holders):
                self._add_bucket(bucket)
        for name, owners in self.plan_times.reduced_separately.items():
            self._add_tied_weight(name, owners)
        return tuple(self.reductions)

    def _add(self, owners: tuple[StageKey, ...], cost: ReductionCost, *, shared: bool = False) -> None:
        seconds, latency, cards = cost
        if seconds <= 0:
            return
        after = tuple(sorted({number for key in owners for number in self.last_reduction_of_stage.get(key, ())}))
        for key in owners:
            self.last_reduction_of_stage[key] = (len(self.reductions),)
        self.reductions.append(GradientReduction(owners, after, seconds, latency, cards, shared))

    def _add_overlapped(self) -> None:
        """Add reductions that overlap the last backward but end after it."""
        for key, stage in self.plan_times.stages.items():
            if stage.stage.operators is not None:
                continue
            work = Load()
            for run, layout in zip(stage.stage.layers, stage.layouts, strict=True):
                if self.plan_times.overlaps_gradient_sync(run):
                    values = _values(run, run.first, run.end, self.plan_times)
                    collective = self.context.collectives.all_reduce(layout.data_groups)
                    sum_up = _all_reduce if run.strategy.sharding is Sharding.NONE else _reduce_scatter
                    work = work.concurrent_with(sum_up(collective, values * self.context.gradient_dtype.num_bytes)[2])
            if any(worker.unfinished_reduce_seconds > 0 for worker in stage.workers):
                self.last_reduction_of_stage[key] = (len(self.reductions),)
                self.reductions.append(GradientReduction((key,), (), 0.0, 0.0, work, overlaps_backward=True))

    def _add_operators(self) -> None:
        """Add the reductions of stages with shardings of operators that follow the last backward; none shares NICs.

        A weight that other stages share is reduced over all of them instead. Devices at the same place of the meshes of all
        pipelines all-reduce what they update.
        """
        meshes: dict[int, list[StageKey]] = {}
        for key, stage in self.plan_times.stages.items():
            if stage.stage.operators is not None:
                costs = operator_stage_costs(stage.stage, self.context)
                if costs.unfinished_reduce_seconds > 0:
                    self.last_reduction_of_stage[key] = (len(self.reductions),)
                    self.reductions.append(GradientReduction((key,), (), 0.0, 0.0, overlaps_backward=True))
                self._add((key,), (costs.late_reduce_seconds, 0.0, Load()))
                if not self._reduces_shared_weight_separately:
                    self._add((key,), (costs.shared.reduce_seconds, 0.0, Load()), shared=True)
                meshes.setdefault(stage.stage.first, []).append(key)
        for keys in meshes.values():
            if len(keys) > 1:
                self._add(tuple(keys), self._cost_over_meshes([self.plan_times.stages[key].stage for key in keys]))

    @property
    def _reduces_shared_weight_separately(self) -> bool:
        return largest_shared_weight(self.context.model) in self.plan_times.reduced_separately

    def _cost_over_meshes(self, stages: Sequence[Stage]) -> ReductionCost:
        """Return the cost of all-reducing gradients over equal meshes of several pipelines, all places at once."""
        costs = operator_stage_costs(stages[0], self.context)
        shared = 0.0 if self._reduces_shared_weight_separately else costs.shared.updated_values
        num_bytes = (costs.weights.updated_values + shared) * self.context.gradient_dtype.num_bytes
        places = zip(*([device.node for device in stage.devices] for stage in stages), strict=True)
        tensors = float(weight_tensors(self.context, stages[0].first, stages[0].end))
        messages = max(message_count(num_bytes, tensors, self.context.runtime), 1.0)
        return _all_reduce(self.context.collectives.all_reduce(tuple(places)), num_bytes, messages)

    def _add_bucket(self, bucket: Bucket) -> None:
        owners = tuple(holder.key for holder in bucket.holders)
        num_bytes = self.context.gradient_dtype.num_bytes
        if bucket.is_reduce_scattered:
            for holder, values in zip(bucket.holders, bucket.values, strict=True):
                if holder.run.strategy.data > 1 and not self.plan_times.overlaps_gradient_sync(holder.run):
                    collective = self.context.collectives.all_reduce(holder.layout.data_groups)
                    messages = self._messages(values * num_bytes, bucket)
                    self._add((holder.key,), _reduce_scatter(collective, values * num_bytes, messages))
            if len(bucket.holders) > 1:
                self._add(owners, self._all_reduce_cost(bucket, num_bytes, sharded=True))
        elif len(bucket.holders) > 1 or not self.plan_times.overlaps_gradient_sync(bucket.holders[0].run):
            self._add(owners, self._all_reduce_cost(bucket, num_bytes, sharded=False))

    def _all_reduce_cost(self, bucket: Bucket, num_bytes: int, *, sharded: bool) -> ReductionCost:
        """Return the cost of one ring per finest slice of the weights, over all ranks that own the slice.

        Slices follow the tensor rank; if gradients are already sharded, one rank of each pipeline owns a slice. A rank with
        several slices joins several rings, one after the other. Parameters that no tensor degree splits are spread over the
        rings of a rank of the highest degree.
        """
        layouts = [holder.layout for holder in bucket.holders]
        slices = slice_count(layouts)
        message = max(
            values / slices_per_member(layout, slices) for values, layout in zip(bucket.values, layouts, strict=True)
        )
        message *= num_bytes
        message /= layouts[0].replicas if sharded else 1
        rounds = slice_rounds(layouts, sharded=sharded)
        return self._rounds_cost(rounds, message, self._messages(message, bucket))

    def _messages(self, num_bytes: float, bucket: Bucket) -> float:
        return max(message_count(num_bytes, float(bucket.tensors), self.context.runtime), 1.0)

    def _add_tied_weight(self, name: str, owners: Sequence[StageKey]) -> None:
        """Add the all-reduce of a tied weight over all its owners.

        It runs per tensor rank if the owners share a tensor degree and each stage's runs share data groups; else per slice of a
        weight that tensor groups divide, and over all ranks if they do not. Where an owner has shardings of operators, all
        ranks sum the whole weight.
        """
        context = self.context
        if any(self.plan_times.stages[key].stage.operators is not None for key in owners):
            members = tuple(node for key in owners for node in self.plan_times.stages[key].layouts[0].members)
            values = next(kind.shared_parameters for kind in context.model.kinds if kind.shared_weight == name)
            ring = context.collectives.all_reduce((members,))
            self._add(tuple(owners), _all_reduce(ring, values * context.gradient_dtype.num_bytes), shared=True)
            return
        holding = [self.plan_times.tied_weight_owners[key][name] for key in owners]
        layouts = [runs[0].layout for runs in holding]
        by_tensor_rank = len({len(layout.data_groups) for layout in layouts}) == 1 and all(
            map(have_same_data_groups, holding)
        )
        if not by_tensor_rank and all(owner.has_slices for runs in holding for owner in runs):
            self._add(tuple(owners), self._sliced_cost(holding), shared=True)
            return
        if by_tensor_rank:
            by_rank = zip(*(layout.data_groups for layout in layouts), strict=True)
            groups = tuple(tuple(chain.from_iterable(of_rank)) for of_rank in by_rank)
        else:
            groups = (tuple(node for layout in layouts for node in layout.members),)
        message = max(run.values for runs in holding for run in runs) * context.gradient_dtype.num_bytes
        self._add(tuple(owners), _all_reduce(context.collectives.all_reduce(groups), message), shared=True)

    def _sliced_cost(self, holding: Sequence[Sequence[TiedWeightOwner]]) -> ReductionCost:
        """Return the cost of one ring per finest slice of a divided tied weight, over the ranks of all stages that own it."""
        owners = list(chain.from_iterable(holding))
        slices = slice_count(owner.layout for owner in owners)
        message = max(owner.values / slices_per_member(owner.layout, slices) for owner in owners)
        rounds: dict[int, list[Nodes]] = {}
        round_count = max(slices_per_member(owner.layout, slices) for owner in owners)
        for number in range(slices):
            nodes: list[str] = []
            for runs in holding:
                groups = (slice_holders(owner.layout.by_index, number, slices) for owner in runs)
                members = runs[0].layout.members
                nodes.extend(members[index] for index in sorted(set(chain.from_iterable(groups))))
            rounds.setdefault(number % round_count, []).append(tuple(nodes))
        return self._rounds_cost(list(rounds.values()), message * self.context.gradient_dtype.num_bytes)

    def _rounds_cost(
        self, rounds: Iterable[Sequence[Nodes]], message_bytes: float, messages: float = 1
    ) -> ReductionCost:
        """Return the cost of rounds of concurrent rings, one round after the other; the largest rings of a round count."""
        total: ReductionCost = (0.0, 0.0, Load())
        for groups in rounds:
            largest = tuple(group for group in groups if len(group) == max(map(len, groups)))
            cost = _all_reduce(self.context.collectives.all_reduce(largest), message_bytes, messages)
            total = (total[0] + cost[0], total[1] + cost[1], total[2].concurrent_with(cost[2]))
        return total


def slice_rounds(layouts: Sequence[RankLayout[str]], *, sharded: bool) -> list[tuple[Nodes, ...]]:
    """Return the rings over ranks with the same slice, in rounds in which no rank takes part twice.

    The least common multiple of the tensor degrees sets the number of slices; if replicas shard gradients, each shard is a
    slice.
    """
    slices = slice_count(layouts)
    round_count = max(slices_per_member(layout, slices) for layout in layouts)
    rounds: dict[int, list[Nodes]] = {}
    for number in range(slices):
        groups = [slice_holders(layout, number, slices) for layout in layouts]
        rings = zip(*groups, strict=True) if sharded else [chain.from_iterable(groups)]
        rounds.setdefault(number % round_count, []).extend(tuple(ring) for ring in rings)
    return [tuple(rings) for _, rings in sorted(rounds.items())]


def _all_reduce(collective: Collective, message_bytes: float, messages: float = 1) -> ReductionCost:
    return _ring_cost(collective, message_bytes, messages, 1.0, collective.ratios.all_reduce)


def _reduce_scatter(collective: Collective, message_bytes: float, messages: float = 1) -> ReductionCost:
    return _ring_cost(collective, message_bytes, messages, 0.5, collective.ratios.reduce_scatter)


def _ring_cost(
    collective: Collective, message_bytes: float, messages: float, share: float, ratio: float
) -> ReductionCost:
    """Return the cost of a share of a ring all-reduce in a number of messages, scaled by a calibrated ratio."""
    work = Load()
    if message_bytes <= 0:
        return 0.0, 0.0, work
    way = collective.fastest_algorithm(message_bytes, messages)
    for card, seconds in way.nic_seconds_per_byte.items():
        work[card] = ratio * share * message_bytes * seconds
    seconds = ratio * share * way.seconds(message_bytes, messages)
    return seconds, ratio * share * messages * way.latency_seconds, work
