"""Plans under way in a namespace: how many there may be, who is next, and what does not count."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest
from flow_cluster import SharedWorld, plan, share
from flow_world import START

from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.installation import InstallationRules, TenantLimits
from trainwright_operator.flow.actions import SetStatus
from trainwright_operator.flow.decide import decide
from trainwright_operator.flow.phases.plan_places import place_of
from trainwright_operator.kube.claim_registry import ClaimRegistry


def limited(limit: int, *names: str, namespace: str = "default") -> list[SharedWorld]:
    """Return plans of a namespace, the first one created first, each of a single small trial."""
    worlds = [plan(name, ("emulated-t4",), trials={"topK": 1}) for name in names]
    for number, world in enumerate(worlds):
        world.rules = InstallationRules(limits=TenantLimits(plans_per_namespace=limit))
        world.namespace, world.created_at = namespace, START + timedelta(seconds=number)
    share(*worlds)
    return worlds


def step(*worlds: SharedWorld, passes: int = 3) -> None:
    for _ in range(passes):
        for world in worlds:
            world.step(1.0)


def is_under_way(world: SharedWorld) -> bool:
    place = place_of(world.own_snapshot().plan, world.status)
    return place is not None and place.is_under_way


def test_plan_beyond_the_limit_waits_and_names_those_under_way() -> None:
    first, _, third, fourth = worlds = limited(2, "a", "b", "c", "d")
    step(*worlds)
    accepted = third.condition("Accepted")
    assert (accepted.status, accepted.reason) == ("Unknown", "PlanLimitReached")
    assert accepted.message == (
        "limits.plansPerNamespace of the installation is 2, and a and b are under way in this namespace; wait until one of "
        "them ends, or suspend or delete one"
    )
    assert ", and 1 plan waits before this one; wait until" in fourth.condition("Accepted").message
    assert third.status.waiting is not None
    assert third.status.waiting.reason == "PlanLimitReached"
    assert [bool(world.created) for world in worlds] == [True, True, False, False]
    while first.succeeded == "Unknown":
        step(*worlds, passes=1)
    step(*worlds)
    assert (is_under_way(third), is_under_way(fourth)) == (True, False)


def test_oldest_plan_is_next_and_a_plan_under_way_is_never_stopped() -> None:
    oldest, *others = limited(1, "old", "b", "c")
    share(*others)
    step(*others)
    share(oldest, *others)
    step(oldest, *others)
    assert [is_under_way(world) for world in (oldest, *others)] == [False, True, False]
    while others[0].succeeded == "Unknown":
        step(oldest, *others, passes=1)
    step(others[1], oldest)
    assert [is_under_way(world) for world in (oldest, others[1])] == [True, False]


def test_suspended_plan_gives_its_place_up_and_waits_for_another() -> None:
    first, second = worlds = limited(1, "a", "b")
    step(*worlds)
    first.change(**first.spec.model_dump(by_alias=True, exclude_unset=True) | {"suspend": True})
    step(*worlds)
    assert (is_under_way(first), is_under_way(second)) == (False, True)
    first.change(**first.spec.model_dump(by_alias=True, exclude_unset=True) | {"suspend": False})
    step(*worlds)
    assert first.condition("Accepted").reason == "PlanLimitReached"
    assert "is 1, and b is under way" in first.condition("Accepted").message
    step(*worlds, passes=600)
    assert {world.succeeded for world in worlds} == {"True"}


def test_plan_that_waits_for_an_edit_holds_no_place() -> None:
    first, second = worlds = limited(1, "a", "b")
    first.rules = replace(first.rules, limits=TenantLimits(plans_per_namespace=1, priority=0))
    first.change(priority=1)
    step(*worlds)
    assert (is_under_way(first), is_under_way(second)) == (False, True)


def test_plan_with_fields_that_an_older_definition_hides_keeps_no_other_from_its_place() -> None:
    first, second = worlds = limited(1, "a", "b")
    first.hidden_fields = ("spec.newer",)
    step(*worlds)
    assert (is_under_way(first), is_under_way(second)) == (False, True)


def test_wait_for_a_place_ends_at_the_deadline_of_waits() -> None:
    first, second = worlds = limited(1, "a", "b")
    first.foreign = dict.fromkeys(("n1", "n2", "n3"), 2)
    second.change(waitDeadlineSeconds=60)
    step(*worlds, passes=70)
    assert second.condition("Succeeded").reason == "WaitDeadlineExceeded"
    assert "PlanLimitReached: limits.plansPerNamespace" in second.condition("Succeeded").message


def test_namespaces_have_places_of_their_own() -> None:
    mine, theirs = limited(1, "a"), limited(1, "b", namespace="other")
    share(*mine, *theirs)
    step(*mine, *theirs)
    assert is_under_way(mine[0])
    assert is_under_way(theirs[0])


def test_place_waits_until_every_plan_was_read_after_a_start() -> None:
    (world,) = limited(1, "a")
    world.step(1.0)
    early = decide(replace(world.snapshot(), claims_known=False), world.now)
    (status,) = [action.status for action in early if isinstance(action, SetStatus)]
    assert "has just started" in status.conditions[0].message


@pytest.mark.parametrize("seed", range(3))
def test_registry_never_lets_more_plans_begin_than_the_limit(seed: int) -> None:
    """Statuses are written late, as where passes leave them to the next one; a restart reads them anew."""
    chance = random.Random(seed)
    worlds = limited(2, *"abcdef")
    registry, seen, ended = ClaimRegistry(), Counter[str](), set[str]()
    registry.expect(())
    while len(seen) < 4:
        world = chance.choice(worlds)
        snapshot = registry.with_claims(world.own_snapshot())
        actions = decide(snapshot, world.now)
        status = next((one.status for one in actions if isinstance(one, SetStatus)), snapshot.plan.status)
        registry.record_decision(snapshot, status)
        world.apply([one for one in actions if not isinstance(one, SetStatus) or chance.random() < 0.5])
        world.pass_time(1.0)
        if any(one.type is ConditionType.SUCCEEDED and one.status != "Unknown" for one in status.conditions):
            ended.add(world.name)
        begun = [one.name for one in worlds if one.created and one.name not in ended]
        assert len(begun) <= 2
        seen.update(begun)
        assert seen.total() < 5000


def test_freed_place_wakes_the_oldest_plan_that_waits() -> None:
    worlds = limited(1, "a", "b", "c")
    registry = ClaimRegistry()
    registry.expect(())
    for world in (*worlds, *worlds):
        snapshot = registry.with_claims(world.own_snapshot())
        actions = decide(snapshot, world.now)
        status = next((one.status for one in actions if isinstance(one, SetStatus)), snapshot.plan.status)
        registry.record_decision(snapshot, status)
        world.apply(actions)
    assert [is_under_way(world) for world in worlds] == [True, False, False]
    registry.plans_to_wake()
    registry.forget("uid-a")
    assert registry.plans_to_wake() == {"uid-b"}
    assert registry.plans_to_wake() == set()
