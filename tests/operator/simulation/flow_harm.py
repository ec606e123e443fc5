"""Faults injected into a gang or the operator while a plan is in progress, and how far a plan is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from flow_world import World

from trainwright import documents
from trainwright_operator.flow import actions as a
from trainwright_operator.flow.gangs.retries import ATTEMPT_KEY, LostAttempt
from trainwright_operator.flow.names import JOBS_CREATED_ANNOTATION


def running(world: World, gang: str) -> bool:
    pods = [pod for pod in world.pods.values() if pod.gang == gang]
    return bool(pods) and all(pod.phase == "Running" for pod in pods)


def requests(world: World) -> Iterator[a.StartPlanner]:
    """Yield the requests for a plan's search."""
    while True:
        yield from (one for one in world.decide() if isinstance(one, a.StartPlanner))
        world.step()


def run_with(world: World, gang: str, harm: Callable[[World], None]) -> World:
    """Run to the end; once all pods of the gang run, inject a fault."""
    world.run(until=lambda: running(world, gang))
    harm(world)
    world.run()
    return world


def lost_attempt(world: World, gang: str) -> LostAttempt:
    """Return the record of the gang's last attempt that the cluster ended."""
    (record,) = (one for one in world.stored.values() if (one.role, one.gang) == (a.StoredRole.ATTEMPT, gang))
    found: LostAttempt = documents.loads(record.data[ATTEMPT_KEY], LostAttempt)
    return found


def fail_pods(world: World, gang: str, **container: object) -> None:
    for name, pod in world.pods.items():
        if pod.gang == gang:
            ended = replace(pod.containers[0], running_since=None, started_at=pod.started_at, finished_at=world.now,
                            **{"exit_code": 1, **container})  # fmt: skip
            world.pods[name] = replace(pod, phase="Failed", containers=(ended,))


def pass_with_kills(world: World, rng: random.Random, *, likely: float, passes: int) -> None:
    """Run passes until there is an answer; the operator is killed between any two actions with probability `likely`."""
    for _ in range(passes):
        todo = world.decide()
        if rng.random() < likely:
            world.apply(_shuffled_once(todo, rng))
            world.restart()
        else:
            world.apply(todo)
        world.pass_time(2.0)
        if world.succeeded != "Unknown":
            break


def _shuffled_once(todo: list[a.Action], rng: random.Random) -> list[a.Action]:
    """Return the first actions of a pass that a kill interrupts."""
    return todo[: rng.randrange(len(todo) + 1)]


def lose_jobs(world: World) -> Callable[[], None]:
    """Delete the plan's jobs as soon as they are made; return what ends that."""
    pass_time = world.pass_time

    def pass_and_lose(seconds: float) -> None:
        pass_time(seconds)
        for stored in world.stored.values():
            if JOBS_CREATED_ANNOTATION in stored.annotations:
                for name in [name for name, job in world.jobs.items() if job.gang == stored.gang]:
                    world.delete_job(name)

    def end() -> None:
        world.pass_time = pass_time  # type: ignore[method-assign]

    world.pass_time = pass_and_lose  # type: ignore[method-assign]
    return end
