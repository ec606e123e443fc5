"""Turns of namespaces in the queue: alike for all plans, nobody starves, and a restart knows them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from flow_cluster import SharedWorld, placed_gangs, plan, share
from flow_world import START
from hypothesis import given
from hypothesis import strategies as st

from trainwright_operator.flow.gangs.placement_queue import gang_claims, gangs_ahead, in_order, last_turn
from trainwright_operator.flow.snapshot import GangClaim
from trainwright_operator.kube.claim_registry import ClaimRegistry

NAMESPACES = ("a", "b", "c")
ONE = {"n1": 1}


def claim(number: int, namespace: str, seconds: int, priority: int = 0, *, begun: bool = False) -> GangClaim:
    since, held = START + timedelta(seconds=seconds), ONE if begun else {}
    return GangClaim(namespace, f"plan-{number}", f"uid-{number:03}", "links", priority, since, "gpu", held, ONE)


@st.composite
def queues(draw: st.DrawFn) -> tuple[list[GangClaim], dict[str, datetime]]:
    one = st.tuples(st.sampled_from(NAMESPACES), st.integers(0, 9), st.integers(0, 1), st.booleans())
    found = draw(st.lists(one, max_size=10))
    waiting = [
        claim(number, namespace, seconds, priority, begun=begun)
        for number, (namespace, seconds, priority, begun) in enumerate(found)
    ]
    turns = draw(st.dictionaries(st.sampled_from(NAMESPACES), st.integers(0, 9)))
    return waiting, {name: START + timedelta(seconds=seconds) for name, seconds in turns.items()}


def dealt(waiting: Iterable[GangClaim], turns: Mapping[str, datetime]) -> list[GangClaim]:
    """Deal the gangs out round by round, as a plain reading of the rule."""
    by_age = sorted(waiting, key=lambda one: (one.since, one.plan_uid))
    arrivals = {one.namespace: one.since for one in reversed(by_age)}
    ranks = {name: (turns.get(name, since), name in turns) for name, since in arrivals.items()}
    order = sorted((one for one in by_age if one.held), key=lambda one: -one.priority)
    order = [
        one
        for priority in (1, 0)
        for one in sorted(
            (one for one in order if one.priority == priority), key=lambda one: (ranks[one.namespace], one.since)
        )
    ]
    for priority in (1, 0):
        piles = defaultdict(list)
        for one in by_age:
            if one.priority == priority and not one.held:
                piles[one.namespace].append(one)
        while any(piles.values()):
            heads = [pile[0] for pile in piles.values() if pile]
            heads.sort(key=lambda one: (ranks[one.namespace], one.since, one.plan_uid))
            order += heads
            for head in heads:
                piles[head.namespace].remove(head)
    return order


@given(queues(), st.randoms(use_true_random=False))
def test_order_is_that_of_dealing_and_alike_for_every_plan(queue, chance) -> None:
    waiting, turns = queue
    order = in_order(waiting, turns)
    assert order == dealt(waiting, turns)
    for _ in waiting:  # each plan has its own claims first, and those of the others in another order
        chance.shuffle(waiting)
        assert in_order(waiting, turns) == order


@given(
    st.lists(st.lists(st.sampled_from(NAMESPACES), max_size=4), min_size=1, max_size=12),
    st.dictionaries(st.sampled_from(NAMESPACES), st.integers(-9, -1)),
)
def test_nobody_waits_for_more_turns_than_namespaces_and_own_gangs_before_it(arrivals, turns) -> None:
    """One gang is served at a time; others arrive meanwhile, as many as like."""
    waiting: list[GangClaim] = []
    last = {name: START + timedelta(seconds=seconds) for name, seconds in turns.items()}
    waits, numbers = Counter[str](), iter(range(1000))
    bound: dict[str, int] = {}
    for now in range(200):
        for namespace in arrivals[now] if now < len(arrivals) else ():
            new = claim(next(numbers), namespace, now)
            before = sum(one.namespace == namespace for one in waiting)
            bound[new.plan_uid] = (before + 1) * len(NAMESPACES)
            waiting.append(new)
        if not waiting:
            continue
        served = in_order(waiting, last)[0]
        waiting.remove(served)
        last[served.namespace] = START + timedelta(seconds=now)
        waits.update(one.plan_uid for one in waiting)
    assert not waiting
    assert not {uid: (count, bound[uid]) for uid, count in waits.items() if count >= bound[uid]}


def many_and_one(count: int, namespace: str = "one") -> tuple[list[SharedWorld], SharedWorld]:
    """Return plans of one namespace whose gangs wait for nodes, and a later plan, of another one; all want all nodes."""
    many = [plan(f"m{number}") for number in range(count)]
    single = plan("single")
    for world in many:
        world.namespace = "many"
    single.namespace = namespace
    for worlds in (many, [*many, single]):
        share(*worlds)
        for world in worlds:
            world.foreign = dict.fromkeys(("n1", "n2", "n3"), 2)
        for _ in range(10):
            for world in worlds:
                world.step(1.0)
    for world in (*many, single):
        world.foreign = {}
    return many, single


@pytest.mark.parametrize(("namespace", "place"), [("one", 1), ("many", 5)])
def test_single_plan_of_another_namespace_waits_for_one_of_many_plans(namespace: str, place: int) -> None:
    many, single = many_and_one(5, namespace)
    begun: list[str] = []
    while single.name not in begun:
        for world in (*many, single):
            world.step(1.0)
            if placed_gangs(world) and world.name not in begun:
                begun.append(world.name)
    assert begun.index("single") == place


def test_turns_are_read_from_the_cluster_after_a_restart() -> None:
    world = plan("a")
    share(world)
    assert last_turn(world.own_snapshot()) is None
    while not placed_gangs(world):
        world.step(1.0)
    placed_at = last_turn(world.own_snapshot())
    assert placed_at is not None
    world.restart()
    assert last_turn(world.own_snapshot()) == placed_at
    while not any(name.endswith("links-result") for name in world.stored):
        world.step(1.0)
    ended_at = last_turn(world.own_snapshot())
    assert ended_at is not None
    assert ended_at > placed_at
    registry = ClaimRegistry()
    assert registry.with_claims(world.own_snapshot()).last_turns == {"default": ended_at}


def test_placement_is_a_turn_at_once() -> None:
    world, registry = plan("a"), ClaimRegistry()
    share(world)
    while not gang_claims(world.own_snapshot()):
        world.step(1.0)
    before = datetime.now(UTC)
    registry.record_placement(world.own_snapshot())
    assert registry.with_claims(world.own_snapshot()).last_turns["default"] >= before


def test_every_pair_of_plans_agrees_on_who_is_first() -> None:
    many, single = many_and_one(3)
    worlds = [*many, single]
    ahead = {}
    for world in worlds:
        snapshot = world.snapshot()
        ahead[world.name] = {one.plan_name for one in gangs_ahead(snapshot, "links")}
        turned = replace(snapshot, other_claims=snapshot.other_claims[::-1])
        assert {one.plan_name for one in gangs_ahead(turned, "links")} == ahead[world.name]
    assert sorted(map(len, ahead.values())) == [0, 1, 2, 3]
    assert "single" in ahead["m1"]
    for first in worlds:
        for second in worlds:
            if first is not second:
                assert (first.name in ahead[second.name]) != (second.name in ahead[first.name])
