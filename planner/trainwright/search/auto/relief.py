"""Plans that lack memory, with as many more layers computed again as make them fit."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from trainwright.cost.memory import in_flight, stage_memory
from trainwright.cost.pace import Paces
from trainwright.cost.seats import Seats
from trainwright.cost.setting import Setting
from trainwright.plan import Plan, Stage
from trainwright.search.auto.setups import Setup, setups, with_setups


def relieved(plan: Plan, setting: Setting) -> Plan | None:
    """In every stage that lacks memory the first layers that keep their activations no longer do, as few as are enough.

    They are found by halving, as if every layer spared some: where one spares nothing there may be more than needed. None
    where all of them are not enough.
    """
    unlike = Paces(plan, setting).unlike_layers
    for index, pipeline in enumerate(plan.pipelines):
        count, changed = len(pipeline.stages), list(setups(pipeline))
        for number, stage in enumerate(pipeline.stages):
            kept = in_flight(plan.schedule, pipeline.micro_batches, number, count)
            room = _Room(setting, kept, pipeline.micro_batches, unlike, stage.first)
            if not room.fits(stage):
                setup = room.relieved(changed[number])
                if setup is None:
                    return None
                changed[number] = setup
        plan = with_setups(plan, index, changed)
    return plan


@dataclass(frozen=True)
class _Room:
    """The memory of one stage's devices, with so many micro-batches in flight."""

    setting: Setting
    kept: int
    micro_batches: int
    unlike: frozenset[int]
    first: int

    def fits(self, stage: Stage) -> bool:
        held = stage_memory(
            stage,
            tuple(Seats.of(stage, run) for run in stage.layers),
            self.setting,
            kept=self.kept,
            micro_batches=self.micro_batches,
            unlike_layers=self.unlike,
        )
        memory = self.setting.memory_of_node
        return all(part.total_bytes <= memory[one.node] for one, part in zip(stage.devices, held, strict=True))

    def relieved(self, setup: Setup) -> Setup | None:
        left = [number for number, layer in enumerate(setup.layers) if not layer.recompute]

        def changed(count: int) -> Setup:
            return setup.some(left[:count], lambda layer: replace(layer, recompute=True))

        fewest = bisect_left(range(len(left) + 1), True, key=lambda count: self.fits(changed(count).stage(self.first)))
        return changed(fewest) if fewest <= len(left) else None
