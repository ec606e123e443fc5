"""Simulated cluster that several plans share: each sees the devices and the waiting gangs of the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from flow_world import World, spec_of

from trainwright_operator.flow.placement_queue import gang_claims, respected_claims
from trainwright_operator.flow.snapshot import GangClaim, Snapshot


@dataclass
class SharedWorld(World):
    """World of one plan among others."""

    name: str = "demo"
    neighbours: list[SharedWorld] = field(default_factory=list)
    foreign: dict[str, int] = field(default_factory=dict)
    """Devices that another workload holds, by node."""

    def own_snapshot(self) -> Snapshot:
        snapshot = super().snapshot()
        return replace(snapshot, plan=replace(snapshot.plan, name=self.name, uid=f"uid-{self.name}"))

    def snapshot(self) -> Snapshot:
        used = Counter(self.foreign)
        for world in self.neighbours:
            used.update(world.own_snapshot().used_devices)
        return replace(self.own_snapshot(), used_devices=dict(used), other_claims=self.claims_of_others())

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
