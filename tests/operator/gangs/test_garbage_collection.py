"""Pods that stay for a while after their job was deleted, until the cluster collects them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from flow_harm import running
from flow_series import gangs
from flow_world import World, spec_of

from trainwright_operator.flow.snapshot import PodFacts, Snapshot


class SlowWorld(World):
    """World that collects the pods of a deleted job after 5 s, and tells times in whole seconds."""

    def __post_init__(self) -> None:
        self.left: dict[str, tuple[PodFacts, float]] = {}
        super().__post_init__()

    def snapshot(self) -> Snapshot:
        found = super().snapshot()
        left = {name: pod for name, (pod, until) in self.left.items() if self.now.timestamp() < until}
        return replace(
            found,
            stored=tuple(replace(one, created_at=one.created_at.replace(microsecond=0)) for one in found.stored),
            pods=(*left.values(), *(pod for pod in found.pods if pod.name not in left)),
        )

    def delete_job(self, name: str) -> None:
        until = (self.now + timedelta(seconds=5)).timestamp()
        self.left |= {pod.name: (pod, until) for pod in self.pods.values() if pod.job == name}
        super().delete_job(name)


def test_pods_of_a_deleted_job_are_not_taken_for_those_of_the_next() -> None:
    trials = {"topK": 2, "baseline": "None"}
    world = SlowWorld(spec=spec_of(trials=trials))
    world.run(until=lambda: running(world, "candidate-1"))
    world.run_seconds = 1000.0
    world.change(trials=trials, suspend=True)
    world.step(0.1)
    world.change(trials=trials)
    for _ in range(200):
        world.step(0.1)
    assert gangs(world) == ["candidate-1", "candidate-1"]
    assert world.trial("candidate-1").state == "Running"
    world.pass_time(1000.0)
    world.run()
    assert world.succeeded == "True"
