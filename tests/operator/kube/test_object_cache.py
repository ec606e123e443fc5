"""Cache of a plan's objects: kept up by events, never older than what was listed, dropped when it may be incomplete."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flow_world import START, World

from trainwright_operator.flow.snapshot import JobFacts, PlanFacts, PodFacts, StoredConfigMap
from trainwright_operator.kube.object_cache import MAX_AGE_SECONDS, ObjectCache

KEY = ("default", "demo")


class Clock:
    """Clock that only tests move."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def pod(name: str = "a", phase: str = "Pending") -> PodFacts:
    return PodFacts(name, "links", "job", "master", 0, START, phase=phase)


@pytest.fixture
def cache() -> ObjectCache:
    cache = ObjectCache()
    cache.store_children("uid", [pod()], [JobFacts("job", "links", START)], (), version=10)
    return cache


def phases(cache: ObjectCache, uid: str = "uid") -> dict[str, str]:
    found = cache.children(uid)
    assert found is not None
    return {name: one.phase for name, one in found.pods.items()}


def test_events_change_what_was_listed(cache: ObjectCache) -> None:
    cache.observe_child("uid", pod(phase="Running"), 11, deleted=False)
    cache.observe_child("uid", pod("b"), 12, deleted=False)
    assert phases(cache) == {"a": "Running", "b": "Pending"}
    cache.observe_child("uid", pod("b"), 13, deleted=True)
    cache.observe_child("uid", JobFacts("job", "links", START, succeeded=True), 14, deleted=False)
    assert phases(cache) == {"a": "Running"}
    found = cache.children("uid")
    assert found is not None
    assert found.jobs["job"].succeeded


@pytest.mark.parametrize("version", [9, 10])
def test_event_from_before_the_listing_is_ignored(cache: ObjectCache, version: int) -> None:
    """It may be of an object that was deleted before the listing, and would bring it back."""
    cache.observe_child("uid", pod("gone"), version, deleted=False)
    cache.observe_child("uid", pod(), version, deleted=True)
    assert phases(cache) == {"a": "Pending"}


def test_late_event_does_not_undo_a_newer_one(cache: ObjectCache) -> None:
    cache.observe_child("uid", pod(phase="Succeeded"), 20, deleted=False)
    cache.observe_child("uid", pod(phase="Running"), 15, deleted=False)
    assert phases(cache) == {"a": "Succeeded"}
    cache.observe_child("uid", pod(), 21, deleted=True)
    cache.observe_child("uid", pod(phase="Succeeded"), 20, deleted=False)
    assert phases(cache) == {}


def test_events_alone_do_not_make_a_plan_known(cache: ObjectCache) -> None:
    cache.observe_child("other", pod(), 30, deleted=False)
    assert cache.children("other") is None


def test_everything_is_listed_again_after_a_while_and_when_the_watch_listed_anew(cache: ObjectCache) -> None:
    cache.forget_all()
    assert cache.children("uid") is None
    clock = Clock()
    cache = ObjectCache(clock)
    cache.store_children("uid", [], [], (), version=1)
    plan = World().snapshot().plan
    cache.store_plan(plan)
    clock.now = MAX_AGE_SECONDS - 1
    cache.observe_plan(replace(plan, resource_version="5"), deleted=False)
    assert cache.children("uid") is not None
    assert cache.plan(KEY) is not None
    clock.now = MAX_AGE_SECONDS
    assert cache.children("uid") is None
    assert cache.plan(KEY) is None


def test_one_listing_drops_what_was_read_before_it_and_nothing_else() -> None:
    clock = Clock()
    cache = ObjectCache(clock)
    for read_at, kind in [(0.0, PodFacts), (5.0, PodFacts), (5.2, JobFacts)]:
        clock.now = read_at
        cache.store_children("uid", [], [], (), version=1)
        cache.observe_listing(kind)
        assert cache.children("uid") is None
        cache.store_children("uid", [], [], (), version=2)
        for _ in range(3):
            clock.now += 0.05
            cache.observe_listing(kind)
        assert cache.children("uid") is not None


def test_new_plan_needs_no_reading_and_has_no_children() -> None:
    cache, plan = ObjectCache(), World().snapshot().plan
    cache.observe_plan(version(plan, 4), deleted=False, is_complete=True, is_new=True)
    assert cache.plan(KEY) == version(plan, 4)
    cache.observe_child(plan.uid, pod(), 5, deleted=False)
    assert phases(cache, plan.uid) == {"a": "Pending"}


def test_plan_that_another_process_began_with_has_unknown_children() -> None:
    world = World()
    world.run(until=lambda: bool(world.status.conditions))
    cache, plan = ObjectCache(), world.snapshot().plan
    cache.observe_plan(plan, deleted=False, is_complete=True)
    cache.observe_plan(plan, deleted=False, is_complete=True, is_new=True)
    assert cache.plan(KEY) == plan
    assert cache.children(plan.uid) is None


def test_dropped_config_maps_are_told_from_none(cache: ObjectCache) -> None:
    cache.drop_stored("uid")
    found = cache.children("uid")
    assert found is not None
    assert found.stored is None


def version(plan: PlanFacts, number: int) -> PlanFacts:
    return replace(plan, resource_version=str(number), generation=number)


def test_plan_follows_newer_events_alone() -> None:
    cache, plan = ObjectCache(), World().snapshot().plan
    cache.observe_plan(version(plan, 4), deleted=False)
    assert cache.plan(KEY) is None
    cache.store_plan(version(plan, 5))
    cache.observe_plan(version(plan, 4), deleted=False)
    assert cache.plan(KEY) == version(plan, 5)
    cache.observe_plan(version(plan, 6), deleted=False)
    assert cache.plan(KEY) == version(plan, 6)
    cache.observe_plan(version(plan, 7), deleted=True)
    assert cache.plan(KEY) is None


def test_written_config_maps_replace_those_of_their_name(cache: ObjectCache) -> None:
    cache.observe_stored("uid", StoredConfigMap("b", "", "document", START, {}))
    cache.observe_stored("uid", StoredConfigMap("a", "", "document", START, {}))
    cache.observe_stored("uid", StoredConfigMap("b", "", "document", START, {"key": "value"}))
    found = cache.children("uid")
    assert found is not None
    assert [(one.name, one.data) for one in found.stored or ()] == [("a", {}), ("b", {"key": "value"})]
    cache.remove_stored("uid", "a")
    assert [one.name for one in found.stored or ()] == ["b"]


def test_event_during_a_listing_is_not_lost(cache: ObjectCache) -> None:
    cache.begin_listing("uid")
    cache.observe_child("uid", pod(phase="Running"), 25, deleted=False)
    cache.observe_child("uid", pod("gone"), 15, deleted=False)
    cache.store_children("uid", [pod()], [], (), version=20)
    assert phases(cache) == {"a": "Running"}


@pytest.mark.parametrize(("told", "kept"), [(4, 5), (6, 6)])
def test_event_during_a_reading_of_the_plan_is_not_lost(told: int, kept: int) -> None:
    cache, plan = ObjectCache(), World().snapshot().plan
    cache.begin_reading(KEY)
    cache.observe_plan(version(plan, told), deleted=False)
    assert cache.store_plan(version(plan, 5)) == version(plan, kept)
    assert cache.plan(KEY) == version(plan, kept)


def test_kept_measurements_are_listed_again_after_a_few_seconds_or_a_write() -> None:
    clock = Clock()
    cache = ObjectCache(clock)
    kept = StoredConfigMap("links-1", "", "measurement", START, {})
    assert cache.measurements("default") is None
    assert cache.store_measurements("default", [kept]) == (kept,)
    clock.now = 4.0
    assert cache.measurements("default") == (kept,)
    assert cache.measurements("other") is None
    cache.forget_measurements("default")
    assert cache.measurements("default") is None
    cache.store_measurements("default", [kept])
    clock.now = 10.0
    assert cache.measurements("default") is None
