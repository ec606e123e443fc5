"""Plans of one namespace, one after another, of which the later ones find what the earlier ones measured."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

from flow_world import World, spec_of

from trainwright_operator.api.spec import TrainingPlanSpec

TAG = "registry.example/worker:1"
FIRST, SECOND = (f"sha256:{digit * 64}" for digit in "12")
GPT = {"layers": 4, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512}
LINKS, PROFILES = ["links"], ["profile-1", "profile-2", "profile-3", "profile-4"]


def registry(digest: str) -> Any:
    """Return what nodes report: this digest for every tag, and its own for an image that is named by digest."""
    return lambda node, image: f"registry.example/worker@{image.partition('@')[2] or digest}"


def spec(**changes: Any) -> TrainingPlanSpec:
    """Return a spec whose plan is quickly found, and not tried."""
    search = {"planner": "Megatron", "limits": {"maxTensorDegree": 2}}
    return spec_of(**{"search": search, "trials": {"topK": 0}} | changes)


def world(**changes: Any) -> World:
    return World(**{"image": TAG, "image_id": registry(FIRST), "spec": spec()} | changes)


def later(first: World, name: str = "second", days: float = 1.0, **changes: Any) -> World:
    """Return another plan of the same namespace that begins some days after the first one's end."""
    second = NamedWorld(
        name=name, **{"image": TAG, "image_id": first.image_id, "nodes": first.nodes, "spec": spec()} | changes
    )
    second.measurements = dict(first.measurements)
    second.now = first.now + timedelta(days=days)
    return second


class NamedWorld(World):
    """World of a plan with a name, and so a uid, of its own."""

    def __init__(self, name: str, **fields: Any) -> None:
        super().__init__(**fields)
        self.name = name

    def snapshot(self) -> Any:
        found = super().snapshot()
        return replace(found, plan=replace(found.plan, name=self.name, uid=f"uid-{self.name}", created_at=self.now))


def measured_gangs(world: World) -> list[str]:
    """Return the gangs that measured links or layers, in order."""
    orders = [name.removesuffix("-order").split("-", 2)[2] for name in world.created if name.endswith("-order")]
    return [gang for gang in orders if not gang.startswith(("candidate", "baseline"))]


@cache
def measured() -> World:
    """Return the world of a plan that measured everything, which no test changes."""
    return ran()


def ran(**changes: Any) -> World:
    found = world(**changes)
    found.run()
    assert found.succeeded == "True", found.condition("Succeeded")
    return found
