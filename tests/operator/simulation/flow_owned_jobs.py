"""Plan whose winner is a job of its own, in a cluster of two nodes."""

from __future__ import annotations

from typing import Any

from flow_handover import NODES, RUN
from flow_world import World, spec_of

from trainwright_operator.api.installation import Handover, HandoverRule, InstallationRules
from trainwright_operator.flow.actions import StoredRole

HOUR = 3600.0


def rules(rule: HandoverRule = HandoverRule.OWNED, max_hours: float | None = None) -> InstallationRules:
    return InstallationRules(handover=Handover(rule, max_hours))


def world_of(rule: HandoverRule = HandoverRule.OWNED, max_hours: float | None = None, **spec: Any) -> World:
    return World(spec=spec_of(**(RUN | spec)), nodes=NODES, rules=rules(rule, max_hours))


def holding(rule: HandoverRule = HandoverRule.OWNED, max_hours: float | None = None, **spec: Any) -> World:
    """Return the world of a plan that has its answer, and whose job runs."""
    world = world_of(rule, max_hours, **spec)
    world.run()
    for _ in range(3):
        world.step()
    return world


def settle(world: World, passes: int = 20) -> None:
    for _ in range(passes):
        world.step()


def told(world: World, reason: str) -> list[str]:
    return [one.message for one in world.events if one.reason == reason]


def records(world: World) -> list[str]:
    return [one.name for one in world.stored.values() if one.role == StoredRole.HANDOVER]


def end_job(world: World, **changes: Any) -> None:
    for name in list(world.winner_jobs):
        world.change_winner_job(name, **changes)
