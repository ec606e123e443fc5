"""Queue between plans: order, no overtaking of large gangs, no deadlock, no half-started gang."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta

import pytest
from flow_cluster import SharedWorld, placed_gangs, plan, share
from flow_world import START
from hypothesis import given
from hypothesis import strategies as st

from trainwright_operator.flow import actions as a
from trainwright_operator.flow.decide import decide
from trainwright_operator.flow.gangs.placement_queue import gang_claims, next_in_line
from trainwright_operator.flow.snapshot import GangClaim


def begins(world: SharedWorld, others: tuple[SharedWorld, ...] = (), passes: int = 400) -> None:
    """Run until a gang of the plan holds devices."""
    for _ in range(passes):
        for one in (world, *others):
            one.step(1.0)
        if placed_gangs(world):
            return
    raise AssertionError(f"no gang of {world.name} was placed")


def test_plans_that_want_the_same_nodes_alternate_when_both_are_of_one_priority():
    first, second = plan("a"), plan("b")
    share(first, second)
    for _ in range(1500):
        first.step(1.0)
        second.step(1.0)
        assert not (placed_gangs(first) and placed_gangs(second) and whole(first) and whole(second))
    assert first.succeeded == second.succeeded == "True"


def whole(world: SharedWorld) -> bool:
    """Return whether a gang of the plan holds all nodes."""
    return any(len(claim.held) == len(world.nodes) for claim in gang_claims(world.own_snapshot()))


def test_waiting_plan_of_higher_priority_goes_first():
    running, low, high = plan("running"), plan("low"), plan("high", priority=5)
    share(running, low, high)
    begins(running)
    for _ in range(8):
        low.step(1.0)
    for _ in range(8):
        high.step(1.0)
    low.step(1.0)
    assert (low.status.queue_position, high.status.queue_position) == (2, 1)
    message = low.condition("LinksMeasured").message
    assert low.condition("LinksMeasured").reason == "WaitingForCapacity"
    assert "1 gang is before it in the queue for its nodes, of plan high; node" in message
    begins(high, (running, low))
    assert not placed_gangs(low)
    for _ in range(900):
        for one in (running, low, high):
            one.step(1.0)
    assert {one.succeeded for one in (running, low, high)} == {"True"}
    assert low.status.queue_position is None


def test_small_gangs_do_not_overtake_a_large_one_for_ever():
    """A plan over all nodes waits for a node that another plan's short gangs use again and again."""
    small, large = plan("small", ("emulated-t4",)), plan("large")
    share(small, large)
    begins(small)
    gangs = len(small.created)
    begins(large, (small,))
    assert len(small.created) - gangs <= 4  # the gang that ran, and the task of its next one, which waits


def test_gang_that_waits_for_another_workload_holds_nobody_back():
    large, small = plan("large"), plan("small", ("emulated-t4",))
    share(large, small)
    large.foreign = small.foreign = {"n1": 2}
    for _ in range(10):
        large.step(1.0)
    assert "node n1 has 0 of 2" in large.condition("LinksMeasured").message
    begins(small, (large,))


def test_half_placed_gang_is_completed_before_any_other():
    half, high = plan("half"), plan("high", priority=9)
    share(half, high)
    while not any(isinstance(action, a.PinPod) for action in half.decide()):
        half.step(1.0)
    pins = [action for action in half.decide() if isinstance(action, a.PinPod)]
    half.apply(pins[:1])
    for _ in range(20):
        high.step(1.0)
        assert not placed_gangs(high)
    begins(half, (high,))
    half.step(1.0)
    assert [claim.wanted for claim in gang_claims(half.own_snapshot())] == [{}]


def test_placement_waits_until_every_plan_was_read_after_a_start():
    world = plan("a")
    share(world)
    while not any(isinstance(action, a.PinPod) for action in world.decide()):
        world.step(1.0)
    early = decide(replace(world.snapshot(), claims_known=False), world.now)
    assert not any(isinstance(action, a.PinPod) for action in early)


NODES = ("n1", "n2", "n3")


@st.composite
def claims(draw: st.DrawFn) -> list[GangClaim]:
    gangs = draw(
        st.lists(
            st.tuples(st.sets(st.sampled_from(NODES), min_size=1), st.integers(0, 2), st.integers(0, 3)), max_size=6
        )
    )
    return [
        GangClaim(
            "default",
            f"plan-{number}",
            f"uid-{number}",
            "links",
            priority,
            START + timedelta(seconds=age),
            "gpu",
            {},
            dict.fromkeys(nodes, 1),
        )
        for number, (nodes, priority, age) in enumerate(gangs)
    ]


@given(claims())
def test_next_in_line_are_disjoint_and_leave_nobody_without_a_predecessor(waiting: list[GangClaim]):
    heads = list(next_in_line(waiting, {}))
    nodes = [name for claim in heads for name in claim.wanted]
    assert len(nodes) == len(set(nodes))
    assert bool(heads) == bool(waiting)
    for claim in waiting:
        before = [other for other in waiting if other.wanted.keys() & claim.wanted.keys() and other is not claim]
        is_first = all(
            (-claim.priority, claim.since, claim.plan_uid) < (-o.priority, o.since, o.plan_uid) for o in before
        )
        assert (claim in heads) == is_first


@pytest.mark.parametrize("seed", range(3))
def test_every_plan_ends_and_no_node_is_given_twice(seed: int):
    chance = random.Random(seed)
    products = [(), ("emulated-v100",), ("emulated-t4",)]
    worlds = [
        plan(f"p{number}", chance.choice(products), chance.randint(-1, 1), trials={"topK": 1}) for number in range(4)
    ]
    share(*worlds)
    while any(one.succeeded == "Unknown" for one in worlds):
        chance.shuffle(worlds)
        for world in worlds:
            world.step(1.0)
            assert all(devices <= 2 for devices in world.snapshot().used_devices.values())
        assert worlds[0].now < START + timedelta(seconds=1500)
    assert {one.succeeded for one in worlds} == {"True"}
