"""Simulated cluster that several plans share: each sees the devices and the waiting gangs of the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from flow_world import START, World, spec_of

from trainwright_operator.flow.gangs.placement_queue import gang_claims, last_turn, respected_claims
from trainwright_operator.flow.phases.plan_places import place_of
from trainwright_operator.flow.snapshot import DeviceHolder, GangClaim, PlanFacts, PlanPlace, Snapshot


@dataclass
class SharedWorld(World):
    """World of one plan among others."""

    name: str = "demo"
    namespace: str = "default"
    created_at: datetime = START
    neighbours: list[SharedWorld] = field(default_factory=list)
    foreign: dict[str, int] = field(default_factory=dict)
    """Devices that another workload holds, by node."""
    holders: dict[str, tuple[DeviceHolder, ...]] = field(default_factory=dict)

    def own_snapshot(self) -> Snapshot:
        snapshot = super().snapshot()
        return replace(snapshot, plan=self._named(snapshot.plan))

    def snapshot(self) -> Snapshot:
        used = Counter(self.foreign)
        for world in self.neighbours:
            used.update(world.own_snapshot().used_devices)
        return replace(
            self.own_snapshot(),
            used_devices=dict(used),
            holders=self.holders,
            other_claims=self.claims_of_others(),
            other_places=self.places_of_others(),
            last_turns=self.last_turns(),
        )

    def _named(self, plan: PlanFacts) -> PlanFacts:
        own = {"namespace": self.namespace, "created_at": self.created_at}
        return replace(plan, name=self.name, uid=f"uid-{self.name}", **own)

    def last_turns(self) -> dict[str, datetime]:
        found: dict[str, datetime] = {}
        for world in self.neighbours:
            turn = last_turn(world.own_snapshot())
            if turn is not None:
                found[world.namespace] = max(turn, found.get(world.namespace, turn))
        return found

    def places_of_others(self) -> tuple[PlanPlace, ...]:
        others = (world for world in self.neighbours if world is not self and world.namespace == self.namespace)
        found = (place_of(world.own_snapshot().plan, world.status) for world in others)
        return tuple(place for place in found if place is not None)

    def claims_of_others(self) -> tuple[GangClaim, ...]:
        others = (world for world in self.neighbours if world is not self)
        return tuple(claim for world in others for claim in respected_claims(world.own_snapshot()))


def share(*worlds: SharedWorld) -> None:
    """Put the plans into one cluster."""
    for world in worlds:
        world.neighbours = list(worlds)


def plan(name: str, products: tuple[str, ...] = (), priority: int = 0, **spec: Any) -> SharedWorld:
    """Return a plan that uses all nodes of the products."""
    search = {"planner": "Megatron", "limits": {"maxTensorDegree": 2}}
    asked = {"priority": priority, "devices": {"products": list(products)}, "search": search} | spec
    return SharedWorld(name=name, spec=spec_of(**asked))


def placed_gangs(world: SharedWorld) -> list[str]:
    """Return the plan's gangs that hold devices."""
    return [claim.gang for claim in gang_claims(world.own_snapshot()) if claim.held]
