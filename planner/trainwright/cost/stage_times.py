"""Forward, backward and last-backward seconds of every stage of a plan, per replica or in lock step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from trainwright.cost.boundaries import redistribution_seconds
from trainwright.cost.collectives import NO_COMMUNICATION, Collective, Nodes
from trainwright.cost.context import KnownStages
from trainwright.cost.divided_activations import DividedSides, SeriesEnds
from trainwright.cost.messages import gather_messages, message_count
from trainwright.cost.operators.stage_costs import operator_stage_costs
from trainwright.cost.operators.stage_passes import OperatorStageCosts
from trainwright.cost.plan_layout import PlanLayout, StageKey
from trainwright.cost.time_terms import (
    LayerPass,
    LayerTerms,
    PassTime,
    StageWorker,
    TensorGroupClass,
    layer_terms,
    overlapped_pass_seconds,
    slowest_terms,
    with_recompute,
)
from trainwright.layer import LayerKind
from trainwright.plan import LayerRun, Stage
from trainwright.rank_layout import RankLayout
from trainwright.strategy import Sharding

_ReplicaKey = tuple[int, tuple[str, ...], Collective]
"""Rows, accelerators and tensor all-reduce of a replica: replicas with equal keys take equally long."""


@dataclass(frozen=True, slots=True)
class _RunCosts:
    """Costs of one layer run that all its replicas share.

    Attributes:
        kinds: layer kinds, each with its number of layers.
        all_gather_seconds: all-gather of one layer's sharded weights, by layer kind; empty if they are not sharded.
        reduce_seconds: reduction of one layer's gradients during the last backward, by layer kind; empty if it comes later.
    """

    run: LayerRun
    kinds: Sequence[tuple[LayerKind, int]]
    all_gather_seconds: Mapping[str, float]
    reduce_seconds: Mapping[str, float]

    def gather_seconds(self, kind: str, *, is_first_pass: bool) -> float:
        """Return the seconds of gathering a layer's weights for a forward; 0 if they are not sharded or still gathered."""
        is_gathered = self.run.strategy.keep_gathered_weights and not is_first_pass
        return 0.0 if is_gathered else self.all_gather_seconds.get(kind, 0.0)

    def backward_gather_seconds(self, kind: LayerKind) -> float:
        """Return the seconds of gathering a layer's weights for a backward, which zero2 has kept since the forward."""
        gathers = self.run.strategy.sharding is Sharding.ZERO3 and not kind.without_backward
        return self.gather_seconds(kind.name, is_first_pass=False) if gathers else 0.0


_TermsByKind = dict[str, LayerTerms[float]]
"""Terms of one layer, by layer kind."""


class _StageTimesBuilder:
    """Builder of the times of one stage."""

    def __init__(
        self, plan_layout: PlanLayout, stage: Stage, layouts: tuple[RankLayout[str], ...], divided_sides: DividedSides
    ) -> None:
        self.plan_layout, self.stage, self.layouts, self.divided_sides = plan_layout, stage, layouts, divided_sides
        self.context = plan_layout.context
        self.run_costs = [self._run_costs(run, layout) for run, layout in zip(stage.layers, layouts, strict=True)]

    def workers(self) -> tuple[StageWorker, ...]:
        """Return the workers of the stage."""
        layouts = self.layouts
        same_layout = all(layouts[0].is_equivalent(other) for other in layouts[1:])
        if not same_layout or self._is_synchronous:
            each = [
                list(dict.fromkeys(self._replica_keys(layout).values()))
                for layout in (layouts[:1] if same_layout else layouts)
            ]
            return (self._worker(each * len(layouts) if same_layout else each),)
        members = self._replica_keys(layouts[0])
        made = {member: self._worker([[member]] * len(layouts)) for member in dict.fromkeys(members.values())}
        worker_of = {replica: made[member] for replica, member in members.items()}
        replicas = zip(layouts[0].rows, layouts[0].tensor_groups, strict=True)
        return tuple(map(worker_of.__getitem__, replicas))

    def _replica_keys(self, layout: RankLayout[str]) -> dict[tuple[int, Nodes], _ReplicaKey]:
        """Return the key of each distinct (rows, tensor group nodes) of the replicas."""
        accelerator_of = self.context.accelerator_of_node
        collective_of: dict[Nodes, tuple[tuple[str, ...], Collective]] = {}
        replica_keys: dict[tuple[int, Nodes], _ReplicaKey] = {}
        for rows, nodes in dict.fromkeys(zip(layout.rows, layout.tensor_groups, strict=True)):
            if nodes not in collective_of:
                names = tuple(sorted({accelerator_of[node] for node in nodes}))
                collective_of[nodes] = (
                    names,
                    NO_COMMUNICATION if layout.arrangement.tensor == 1 else self.plan_layout.tensor_all_reduce(nodes),
                )
            replica_keys[rows, nodes] = (rows, *collective_of[nodes])
        return replica_keys

    def _run_costs(self, run: LayerRun, layout: RankLayout[str]) -> _RunCosts:
        context = self.context
        kinds = context.kind_counts(run.first, run.end)
        gathers: dict[str, float] = {}
        if self.plan_layout.gathers_for_passes(run):
            collective = context.collectives.under_load(layout.data_groups, self.plan_layout.all_gather_rings)
            divided, value_bytes = context.divided_by(run.strategy), context.model.dtype.num_bytes
            gathers = {
                kind.name: collective.all_gather_seconds(
                    divided.parameters(kind) * value_bytes, gather_messages(kind, context.runtime)
                )
                for kind, _ in kinds
            }
        reduces: dict[str, float] = {}
        if self.plan_layout.overlaps_gradient_sync(run):
            collective = context.collectives.all_reduce(layout.data_groups)
            reduces = {kind.name: self._reduce_seconds(kind, run, collective) for kind, _ in kinds}
        return _RunCosts(run, kinds, gathers, reduces)

    def _worker(self, members: list[list[_ReplicaKey]]) -> StageWorker:
        """Return the worker that consists of these replicas of each layer run."""
        forward_compute = forward_sync = backward_compute = backward_sync = 0.0
        taken: list[_TermsByKind] = []
        for part, group in zip(self.run_costs, members, strict=True):
            seconds = {kind.name: self._layer(kind, part.run, group) for kind, _ in part.kinds}
            taken.append(seconds)
            for kind, count in part.kinds:
                terms = seconds[kind.name]
                forward_compute += count * terms.forward_seconds
                forward_sync += count * terms.forward_sync_seconds
                backward_compute += count * terms.backward_seconds
                backward_sync += count * terms.backward_sync_seconds
        moved_forward, moved_backward = self._redistribution
        ends_forward, ends_backward = self._series_ends_seconds(members)
        forward_sharding = backward_sharding = first_gather = 0.0
        if self._is_synchronous:
            forward_sharding = overlapped_pass_seconds(
                list(self._forward_passes(taken, is_first=False)), self._slowdown
            )[0]
            if any(part.run.strategy.keep_gathered_weights for part in self.run_costs):
                first = overlapped_pass_seconds(list(self._forward_passes(taken, is_first=True)), self._slowdown)[0]
                first_gather = first - forward_sharding
            forward_sharding -= forward_compute + forward_sync
            passes = list(self._backward_passes(taken, last=False))
            backward_sharding = sum(overlapped_pass_seconds(passes, self._slowdown))
            backward_sharding -= backward_compute + backward_sync
        forward = PassTime(forward_compute, forward_sync + ends_forward, forward_sharding, moved_forward)
        backward = PassTime(backward_compute, backward_sync + ends_backward, backward_sharding, moved_backward)
        last, left = backward.seconds, 0.0
        if any(part.reduce_seconds for part in self.run_costs):
            last, left = overlapped_pass_seconds(list(self._backward_passes(taken, last=True)), self._slowdown)
            last += moved_backward + ends_backward
        return StageWorker(forward, backward, last, left, first_gather)

    @cached_property
    def _is_synchronous(self) -> bool:
        """Is True if replicas wait for each other in every micro-batch: to gather weights or to reduce gradients."""
        return any(part.all_gather_seconds or self._reduces_always(part) for part in self.run_costs)

    def _reduces_always(self, part: _RunCosts) -> bool:
        """Return whether gradients are reduced in the backward of every micro-batch."""
        shards = part.run.strategy.sharding in {Sharding.ZERO2, Sharding.ZERO3}
        always = (shards and self.context.runtime.reduces_every_micro_batch) or self.plan_layout.syncs_every_micro_batch
        return always and bool(part.reduce_seconds)

    @property
    def _slowdown(self) -> float:
        return self.context.runtime.overlap_slowdown_ratio

    def _layer(self, kind: LayerKind, run: LayerRun, group: list[_ReplicaKey]) -> LayerTerms[float]:
        group_terms = [
            layer_terms(
                kind,
                TensorGroupClass(accelerators, run.strategy.tensor, collective),
                rows,
                self.context,
                self.context.divided_activations.split(kind, run.strategy),
            )
            for rows, accelerators, collective in group
        ]
        if run.strategy.recompute and not kind.without_backward:
            group_terms = [with_recompute(terms) for terms in group_terms]
        return group_terms[0] if len(group_terms) == 1 else slowest_terms(group_terms)

    def _series_ends_seconds(self, members: list[list[_ReplicaKey]]) -> tuple[float, float]:
        """Return the seconds of gathering boundaries after series of sequence-parallel layers, and gradients before them."""
        forward = backward = 0.0
        ends = [self.context.divided_activations.series_ends(part.run) for part in self.run_costs]
        for place, (part, own, group) in enumerate(zip(self.run_costs, ends, members, strict=True)):
            if not (own.begins or own.ends or own.gathered_row_bytes):
                continue
            behind, before = list(own.gathered_row_bytes), list(own.gathered_gradient_row_bytes)
            if own.ends and not self._stays_divided(ends, place, place + 1):
                behind.append(self.context.row_bytes[part.run.end])
            if own.begins and not self._stays_divided(ends, place - 1, place):
                before.append(self.context.row_bytes[part.run.first])
            forward += max(sum(ring.all_gather_seconds(rows * size) for size in behind) for rows, _, ring in group)
            backward += max(sum(ring.all_gather_seconds(rows * size) for size in before) for rows, _, ring in group)
        return forward, backward

    def _stays_divided(self, ends: Sequence[SeriesEnds], before: int, behind: int) -> bool:
        """Return whether a series of sequence-parallel layers goes on from one layer run into the next, or the next stage."""
        if before < 0:
            return self.divided_sides.before
        if behind == len(ends):
            return self.divided_sides.after
        return ends[before].ends and ends[behind].begins and self.layouts[before].is_equivalent(self.layouts[behind])

    @cached_property
    def _redistribution(self) -> tuple[float, float]:
        forward = backward = 0.0
        for (run, old), (_, new) in pairwise(zip(self.stage.layers, self.layouts, strict=True)):
            if not old.is_equivalent(new):
                row_bytes = self.context.model.output_bytes_per_row(run.end - 1)
                forward += redistribution_seconds(old, new, row_bytes, self.context.network)
                backward += redistribution_seconds(new, old, row_bytes, self.context.network)
        return forward, backward

    def _forward_passes(self, seconds_by_run: Sequence[_TermsByKind], *, is_first: bool) -> Iterator[LayerPass]:
        layers = self.context.model.layers
        for part, seconds in zip(self.run_costs, seconds_by_run, strict=True):
            steps = {
                name: LayerPass(
                    terms.forward_seconds, terms.forward_sync_seconds, part.gather_seconds(name, is_first_pass=is_first)
                )
                for name, terms in seconds.items()
            }
            yield from (steps[name] for name in layers[part.run.first : part.run.end])

    def _backward_passes(self, seconds_by_run: Sequence[_TermsByKind], *, last: bool) -> Iterator[LayerPass]:
        layers = self.context.model.layers
        for part, seconds in zip(reversed(self.run_costs), reversed(seconds_by_run), strict=True):
            run, steps = part.run, {}
            for name, terms in seconds.items():
                gather = part.backward_gather_seconds(self.context.model.kind(name))
                reduce = part.reduce_seconds.get(name, 0.0) if last or self._reduces_always(part) else 0.0
                waits = reduce > 0 and run.strategy.sharding in {Sharding.ZERO2, Sharding.ZERO3}
                steps[name] = LayerPass(terms.backward_seconds, terms.backward_sync_seconds, gather, reduce, waits)
            yield from (steps[name] for name in reversed(layers[run.first : run.end]))

    def _reduce_seconds(self, kind: LayerKind, run: LayerRun, collective: Collective) -> float:
        """Return the seconds of reducing one layer's gradients.

        The gradients of a tied weight are reduced with its first layer, or separately.
        """
        divided = self.context.divided_by(run.strategy)
        values = divided.trained_parameters(kind)
        name = kind.shared_weight
        if name is not None and (
            name in self.plan_layout.reduced_separately
            or self.context.model.kind_of(self.context.first_layer_with_tied_weight[name]) is not kind
        ):
            values -= divided.tied_parameters(kind)
        num_bytes = values * self.context.gradient_dtype.num_bytes
        sum_up = collective.seconds if run.strategy.sharding is Sharding.NONE else collective.reduce_scatter_seconds
        return sum_up(num_bytes, message_count(num_bytes, kind.weight_tensors, self.context.runtime))


@dataclass(frozen=True)
class StageTimes:
    """Workers of a stage: one if the stage runs in lock step, else one per replica."""

    stage: Stage
    layouts: tuple[RankLayout[str], ...]
    workers: tuple[StageWorker, ...]

    def worker_index(self, replica: int) -> int:
        return 0 if len(self.workers) == 1 else replica


@dataclass(frozen=True)
class PlanTimes(PlanLayout):
    """Times of all stages of a plan."""

    @cached_property
    def stages(self) -> dict[StageKey, StageTimes]:
        stages = {key: self.plan.pipelines[key[0]].stages[key[1]] for key in self.layouts}
        return {
            key: StageTimes(stages[key], layouts, self._workers(stages[key], layouts, self.divided_sides(*key)))
            for key, layouts in self.layouts.items()
        }

    def _workers(
        self, stage: Stage, layouts: tuple[RankLayout[str], ...], divided_sides: DividedSides
    ) -> tuple[StageWorker, ...]:
        """Return the workers of a stage; those that depend on no other stage's ranks are computed once for all plans."""
        if stage.operators is not None:
            return (_operator_worker(operator_stage_costs(stage, self.context)),)

        def make() -> tuple[StageWorker, ...]:
            return _StageTimesBuilder(self, stage, layouts, divided_sides).workers()

        if len(self.plan.pipelines) > 1 or any(map(_shares_nics, stage.layers, layouts)):
            return make()
        known_workers: KnownStages[tuple[StageWorker, ...]] = self.context.known_workers
        key = layouts[0].members, stage.layers, divided_sides, tuple(self.reduced_separately)
        return known_workers.value(key, make)


def _operator_worker(costs: OperatorStageCosts) -> StageWorker:
    """Return the only worker of a stage with shardings of operators."""
    return StageWorker(costs.forward, costs.backward, costs.last_backward_seconds, costs.unfinished_reduce_seconds)


def _shares_nics(run: LayerRun, layout: RankLayout[str]) -> bool:
    """Return whether collectives of a pass leave their nodes, so that those of other stages slow them down."""
    groups = layout.tensor_groups if run.strategy.tensor > 1 else ()
    if run.strategy.sharding is Sharding.ZERO3 and run.strategy.data > 1:
        groups += layout.data_groups
    return any(len(set(nodes)) > 1 for nodes in groups)
