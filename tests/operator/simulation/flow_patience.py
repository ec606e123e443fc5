"""Plans that wait for what the cluster lacks, in the simulated cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flow_harm import lose_jobs
from flow_series import states
from flow_world import START, World, spec_of

from trainwright_operator.flow.actions import PinPod
from trainwright_operator.flow.snapshot import ContainerFacts

GANGS = ["links", "profile-1", "candidate-1"]
EVERYWHERE = {"n1": 2, "n2": 2, "n3": 2}
CONDITIONS = {"links": "LinksMeasured", "profile-1": "Profiled", "candidate-1": "TrialsCompleted"}


def wait(world: World, hours: float, step_seconds: float = 60.0) -> None:
    for _ in range(round(hours * 3600 / step_seconds)):
        world.step(step_seconds)


def told(world: World, gang: str) -> tuple[str, str]:
    found = world.condition(CONDITIONS[gang])
    assert world.condition("Succeeded").reason == found.reason, "the printed column says what is waited for"
    return found.status, found.reason


def succeeds(world: World) -> None:
    world.run()
    assert world.succeeded == "True", world.condition("Succeeded")
    assert set(states(world).values()) == {"Succeeded"}


def stick(world: World, waiting: str) -> list[float]:
    """Let no container start from now on; return the times of the attempts, in seconds."""
    pin, times = world._pin, []

    def pin_stuck(action: PinPod) -> None:
        pin(action)
        times.append((world.now - START).total_seconds())
        stuck = ContainerFacts("pytorch", waiting_reason=waiting, waiting_message="no such image worker:1")
        bound = replace(world.pods[action.name], node=action.node, started_at=world.now, containers=(stuck,))
        world.pods[action.name] = bound

    world._pin = pin_stuck  # type: ignore[method-assign]
    return times


def lost_links(**spec: Any) -> tuple[World, Callable[[], None]]:
    """Return a plan that loses its jobs again and again, and what ends that."""
    world = World(spec=spec_of(**spec))
    end = lose_jobs(world)
    world.run(until=lambda: world.status.waiting is not None and world.status.waiting.next_try is not None)
    return world, end
