"""Worker image: measurements of one plan are all of one image, whatever becomes of the default or of a tag."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flow_harm import lost_attempt, running
from flow_world import World, node, spec_of

from trainwright_operator.flow.actions import CreateJob

FIRST, SECOND = (f"sha256:{digit * 64}" for digit in "12")
TAG = "registry.example/worker:1"


def registry(digest: str, loaded: str = "") -> object:
    """Return what nodes report: this digest for every tag, and its own for an image that is named by digest."""
    return lambda node, image: loaded or f"registry.example/worker@{image.partition('@')[2] or digest}"


def tagged(**changes: object) -> World:
    return World(image=TAG, image_id=registry(FIRST), **changes)  # type: ignore[arg-type]


def measured(world: World, gang: str) -> bool:
    return any(name.endswith(f"-{gang}-result") for name in world.stored)


def images(world: World) -> set[str]:
    return set(world.images.values())


def test_plan_keeps_its_image_when_the_default_changes() -> None:
    world = World(image="worker:1")
    world.run(until=lambda: running(world, "links"))
    world.image = "worker:2"
    world.restart()
    world.run()
    assert images(world) == {"worker:1"}
    world.change(trials={"topK": 4})  # asks for further trials beside the same profiles
    world.run()
    assert images(world) == {"worker:1"}


def test_gang_keeps_its_image_when_the_default_changes_between_two_of_its_jobs() -> None:
    world = World(image="worker:1", nodes=(node("n1"), node("n2", devices=1)))
    while not any(isinstance(action, CreateJob) for action in world.decide()):
        world.step()
    actions = world.decide()
    first = next(number for number, action in enumerate(actions) if isinstance(action, CreateJob))
    world.apply(actions[: first + 1])
    world.image = "worker:2"
    world.run()
    assert images(world) == {"worker:1"}


def test_plan_measures_anew_with_the_default_after_an_edit_that_asks_for_it() -> None:
    world = World(image="worker:1")
    world.run()
    world.image = "worker:2"
    before = len(world.images)
    world.change(profiling={"iterations": 20})
    world.run()
    assert set(list(world.images.values())[before:]) == {"worker:2"}


def test_later_pods_name_the_digest_that_was_measured_first() -> None:
    world = tagged()
    world.run(until=lambda: measured(world, "links"))
    world.image_id = registry(SECOND)  # type: ignore[assignment]
    world.run()
    assert images(world) == {TAG, f"registry.example/worker@{FIRST}"}
    assert world.succeeded == "True"


@pytest.mark.parametrize("loaded", ["docker.io/library/import-2026-01-01@" + FIRST, FIRST])
def test_image_that_was_loaded_into_nodes_is_not_asked_for_by_digest(loaded: str) -> None:
    world = World(image=TAG, image_id=registry("", loaded))  # type: ignore[arg-type]
    world.run()
    assert images(world) == {TAG}
    assert world.succeeded == "True"


@pytest.mark.parametrize("per_gang", [1, 5])
def test_trial_of_another_image_than_the_profiles_waits_for_theirs(per_gang: int) -> None:
    loaded = ["docker.io/library/import@" + FIRST]
    world = World(image=TAG, spec=spec_of(trials={"perGang": per_gang}), image_id=lambda node, image: loaded[0])
    world.run(until=lambda: measured(world, "profile-1"))
    loaded[0] = "docker.io/library/import@" + SECOND
    world.run(until=lambda: any(one.role == "attempt" for one in world.stored.values()))
    gang = next(one.gang for one in world.stored.values() if one.role == "attempt")
    lost = lost_attempt(world, gang)
    assert lost.reason == "ImageChanged"
    assert FIRST in lost.message
    assert SECOND in lost.message
    assert world.succeeded == "Unknown"
    loaded[0] = "docker.io/library/import@" + FIRST
    world.run()
    assert world.succeeded == "True"


def test_gang_whose_pods_run_two_images_is_tried_again() -> None:
    stale = {"n2"}
    world = World(image=TAG, image_id=lambda node, image: f"x@{SECOND if node in stale else FIRST}")
    world.run(until=lambda: any(one.role == "attempt" for one in world.stored.values()))
    assert lost_attempt(world, "links").reason == "ImageChanged"
    stale.clear()
    world.run()
    assert world.succeeded == "True"


def test_digests_of_two_architectures_do_not_conflict() -> None:
    nodes = (node("n1"), node("n2"), node("n3", "emulated-t4"))
    labelled = tuple(
        replace(one, labels={**one.labels, "kubernetes.io/arch": "arm64" if one.name == "n3" else "amd64"})
        for one in nodes
    )
    ids = {"n1": FIRST, "n2": FIRST, "n3": SECOND}
    world = World(
        image=TAG,
        nodes=labelled,
        spec=spec_of(worker={"architectures": ["amd64", "arm64"]}),
        image_id=lambda node, image: f"registry.example/worker@{image.partition('@')[2] or ids[node]}",
    )
    world.run()
    assert world.succeeded == "True"
    assert images(world) == {TAG, *(f"registry.example/worker@{one}" for one in (FIRST, SECOND))}
