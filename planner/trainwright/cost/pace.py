"""How long the passes of every stage of a plan take, and what its stages share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from trainwright.cost.collectives import Collective, Nodes, RingLoad
from trainwright.cost.seats import Seats
from trainwright.cost.setting import Setting
from trainwright.cost.shared_weights import HeldValues, Holding, are_summed_alike, holdings
from trainwright.cost.stage_pace import StageBuilder, StagePace
from trainwright.plan import LayerRun, Plan, Sharding

StageKey = tuple[int, int]
"""(pipeline, stage)."""


@dataclass(frozen=True)
class Paces:
    """The paces of all stages of a plan."""

    plan: Plan
    setting: Setting

    @cached_property
    def seats(self) -> dict[StageKey, tuple[Seats, ...]]:
        """By stage: how each of its runs arranges its ranks."""
        return {
            (index, number): tuple(Seats.of(stage, run) for run in stage.layers)
            for index, pipeline in enumerate(self.plan.pipelines)
            for number, stage in enumerate(pipeline.stages)
        }

    @cached_property
    def stages(self) -> dict[StageKey, StagePace]:
        return {
            key: StageBuilder(self, self.plan.pipelines[key[0]].stages[key[1]], seats).build()
            for key, seats in self.seats.items()
        }

    @cached_property
    def apart(self) -> dict[str, tuple[StageKey, ...]]:
        """Weights that are summed apart, and the stages that hold them: several of a pipeline, or runs arranged differently."""
        owners: dict[str, list[StageKey]] = {}
        unlike: set[str] = set()
        for key, found in self.holdings.items():
            for name, runs in found.items():
                owners.setdefault(name, []).append(key)
                if not are_summed_alike(runs):
                    unlike.add(name)
        pipelines = len(self.plan.pipelines)
        return {name: tuple(keys) for name, keys in owners.items() if len(keys) > pipelines or name in unlike}

    @cached_property
    def holdings(self) -> dict[StageKey, dict[str, list[Holding]]]:
        """By stage: its runs that hold a weight which layers share."""
        stages = ((key, self.plan.pipelines[key[0]].stages[key[1]]) for key in self.seats)
        return {key: holdings(stage, self.seats[key], self.setting) for key, stage in stages}

    @cached_property
    def held(self) -> dict[StageKey, HeldValues]:
        """By stage: the values that its ranks hold."""
        stages = ((key, self.plan.pipelines[key[0]].stages[key[1]]) for key in self.seats)
        return {key: HeldValues.of(stage, self.holdings[key], self.setting) for key, stage in stages}

    @cached_property
    def tensor_load(self) -> RingLoad:
        """How often tensor rings use every card; in a full pipeline they all run at about the same time."""
        return self._load({key: [seats.replicas for seats in stage] for key, stage in self.seats.items()})

    @cached_property
    def gather_load(self) -> RingLoad:
        """The same of the rings that collect sharded weights."""
        groups = {}
        for key, stage in self.seats.items():
            runs = self.plan.pipelines[key[0]].stages[key[1]].layers
            groups[key] = [s.data_groups for s, run in zip(stage, runs, strict=True) if run.sharding is Sharding.ZERO3]
        return self._load(groups)

    def _load(self, groups: dict[StageKey, list[tuple[Nodes, ...]]]) -> RingLoad:
        """Runs of a stage take turns, stages do not."""
        total = RingLoad()
        for runs in groups.values():
            stage = RingLoad()
            for arrangement in dict.fromkeys(runs):
                if len(arrangement[0]) > 1:
                    crossing = [nodes for nodes in arrangement if len(set(nodes)) > 1]
                    stage |= self.setting.collectives.ring_load(crossing)
            total += stage
        return total

    def tensor_collective(self, nodes: Nodes) -> Collective:
        """The all-reduce of one tensor group."""
        if len(set(nodes)) == 1:
            return self.setting.collectives.all_reduce((nodes,))
        return self.setting.collectives.beside((nodes,), self.tensor_load)

    @cached_property
    def unlike_layers(self) -> frozenset[int]:
        """Layers whose weights not all pipelines divide in the same way, by tensor degree and among replicas."""
        ways: dict[int, set[tuple[int, int, bool]]] = {}
        if len(self.plan.pipelines) > 1:
            for pipeline in self.plan.pipelines:
                for run in (run for stage in pipeline.stages for run in stage.layers):
                    way = run.tensor, run.data, run.sharding is Sharding.NONE
                    for layer in range(run.first, run.end):
                        ways.setdefault(layer, set()).add(way)
        return frozenset(layer for layer, found in ways.items() if len(found) > 1)

    def sums_meanwhile(self, run: LayerRun) -> bool:
        """Whether the run's gradients are summed while the last backward still runs.

        With several pipelines, those that are not sharded are summed over pipelines that end at different times, and
        so after the last backward; and so are those that pipelines divide in different ways.
        """
        if run.data == 1 or not self.unlike_layers.isdisjoint(range(run.first, run.end)):
            return False
        if run.sharding in {Sharding.ZERO2, Sharding.ZERO3}:
            return True
        alone = len(self.plan.pipelines) == 1
        return self.setting.runtime.overlaps_gradients and (alone or run.sharding is Sharding.ZERO1)
