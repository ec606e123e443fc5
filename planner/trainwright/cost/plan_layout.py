"""Ranks of all stages of a plan, and what the stages share: communicating groups, gradients and tied weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from trainwright.cost.collectives import Collective, ConcurrentRings, Nodes
from trainwright.cost.context import CostContext
from trainwright.cost.divided_activations import DividedSides
from trainwright.cost.tied_weights import ResidentParameters, TiedWeightOwner, have_same_data_groups, tied_weight_owners
from trainwright.plan import LayerRun, Plan
from trainwright.rank_layout import RankLayout, node_layouts
from trainwright.strategy import Sharding

StageKey = tuple[int, int]
"""(pipeline, stage)."""


@dataclass(frozen=True)
class PlanLayout:
    """Ranks of all stages of a plan, and what the stages share."""

    plan: Plan
    context: CostContext

    @cached_property
    def layouts(self) -> dict[StageKey, tuple[RankLayout[str], ...]]:
        """Rank layout of each layer run, by stage."""
        return {
            (index, number): node_layouts(stage)
            for index, pipeline in enumerate(self.plan.pipelines)
            for number, stage in enumerate(pipeline.stages)
        }

    def divided_sides(self, pipeline: int, stage: int) -> DividedSides:
        """Return which boundaries of a stage stay divided along the sequence."""
        stages, divides = self.plan.pipelines[pipeline].stages, self.context.divided_activations.divides_boundary
        return DividedSides(
            stage > 0 and divides(stages[stage - 1].layers[-1], stages[stage].layers[0]),
            stage + 1 < len(stages) and divides(stages[stage].layers[-1], stages[stage + 1].layers[0]),
        )

    @cached_property
    def reduced_separately(self) -> dict[str, tuple[StageKey, ...]]:
        """Tied weights with a reduction of their own, and the stages that own them.

        A weight has one if a pipeline has it in several stages, or if its layer runs have different data groups. Inside a
        stage with shardings of operators, their costs have it.
        """
        owners: dict[str, list[StageKey]] = {}
        differently_reduced: set[str] = set()
        for key, owners_by_name in self.tied_weight_owners.items():
            costs_operators = self.plan.pipelines[key[0]].stages[key[1]].operators is not None
            for name, runs in owners_by_name.items():
                owners.setdefault(name, []).append(key)
                if not costs_operators and not have_same_data_groups(runs):
                    differently_reduced.add(name)
        pipelines = len(self.plan.pipelines)
        return {
            name: tuple(keys) for name, keys in owners.items() if len(keys) > pipelines or name in differently_reduced
        }

    @cached_property
    def tied_weight_owners(self) -> dict[StageKey, dict[str, list[TiedWeightOwner]]]:
        """Layer runs that own each tied weight, by stage."""
        stages = ((key, self.plan.pipelines[key[0]].stages[key[1]]) for key in self.layouts)
        return {key: tied_weight_owners(stage, self.layouts[key], self.context) for key, stage in stages}

    @cached_property
    def resident(self) -> dict[StageKey, ResidentParameters]:
        """Parameters resident on a rank, by stage."""
        stages = ((key, self.plan.pipelines[key[0]].stages[key[1]]) for key in self.layouts)
        return {key: ResidentParameters.of(stage, self.tied_weight_owners[key], self.context) for key, stage in stages}

    @cached_property
    def tensor_rings(self) -> ConcurrentRings:
        """NIC uses of all tensor rings, which run at about the same time in a full pipeline."""
        return self._concurrent_rings(
            {key: [layout.tensor_groups for layout in stage] for key, stage in self.layouts.items()}
        )

    @cached_property
    def all_gather_rings(self) -> ConcurrentRings:
        """NIC uses of the rings that all-gather sharded weights."""
        groups = {}
        for key, stage in self.layouts.items():
            runs = self.plan.pipelines[key[0]].stages[key[1]].layers
            groups[key] = [s.data_groups for s, run in zip(stage, runs, strict=True) if self.gathers_for_passes(run)]
        return self._concurrent_rings(groups)

    def _concurrent_rings(self, groups: dict[StageKey, list[tuple[Nodes, ...]]]) -> ConcurrentRings:
        """Combine rings: the runs of a stage alternate, the stages are concurrent."""
        total = ConcurrentRings()
        for runs in groups.values():
            stage = ConcurrentRings()
            for arrangement in dict.fromkeys(runs):
                if len(arrangement[0]) > 1:
                    crossing = [nodes for nodes in arrangement if len(set(nodes)) > 1]
                    stage |= self.context.collectives.concurrent_rings(crossing)
            total += stage
        return total

    def tensor_all_reduce(self, nodes: Nodes) -> Collective:
        """Return the all-reduce of one tensor group."""
        if len(set(nodes)) == 1:
            return self.context.collectives.all_reduce((nodes,))
        return self.context.collectives.under_load((nodes,), self.tensor_rings)

    @cached_property
    def mixed_sharding_layers(self) -> frozenset[int]:
        """Layers whose weights pipelines split differently, by tensor degree or among data replicas."""
        shardings: dict[int, set[tuple[int, int, bool]]] = {}
        if len(self.plan.pipelines) > 1:
            for pipeline in self.plan.pipelines:
                for run in (run for stage in pipeline.stages for run in stage.layers):
                    way = *run.strategy.degrees, run.strategy.sharding is Sharding.NONE
                    for layer in range(run.first, run.end):
                        shardings.setdefault(layer, set()).add(way)
        return frozenset(layer for layer, distinct in shardings.items() if len(distinct) > 1)

    @cached_property
    def syncs_every_micro_batch(self) -> bool:
        """Is True if replicas communicate in every micro-batch, whatever they shard."""
        is_staged = any(len(pipeline.stages) > 1 for pipeline in self.plan.pipelines)
        return self.context.runtime.syncs_every_micro_batch and not is_staged

    def gathers_for_passes(self, run: LayerRun) -> bool:
        """Return whether a run's replicas all-gather weights for passes: under zero3 for all, else for forwards alone."""
        if run.strategy.data == 1:
            return False
        return run.strategy.sharding is Sharding.ZERO3 or (
            run.strategy.sharding is Sharding.ZERO2 and self.syncs_every_micro_batch
        )

    def overlaps_gradient_sync(self, run: LayerRun) -> bool:
        """Return whether the run's gradients are reduced during the last backward.

        They are not if pipelines split them differently, nor if several pipelines, which end at different times, reduce
        unsharded gradients together.
        """
        if run.strategy.data == 1 or not self.mixed_sharding_layers.isdisjoint(range(run.first, run.end)):
            return False
        if run.strategy.sharding in {Sharding.ZERO2, Sharding.ZERO3}:
            return True
        alone = len(self.plan.pipelines) == 1
        return self.context.runtime.overlaps_gradients and (alone or run.strategy.sharding is Sharding.ZERO1)
