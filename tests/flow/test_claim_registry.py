"""Claims of all plans: who is woken when a node is released, and when they are complete after a start."""

from __future__ import annotations

from flow_cluster import SharedWorld, placed_gangs, plan, share

from trainwright_operator.kube.claim_registry import ClaimRegistry


def gated(name: str) -> SharedWorld:
    world = plan(name)
    world.foreign = {"n1": 2}
    share(world)
    for _ in range(10):
        world.step(1.0)
    return world


def test_next_plan_is_woken_once_when_a_node_is_released():
    registry, first, second = ClaimRegistry(), gated("a"), gated("b")
    for world in (first, second):
        registry.with_claims(world.own_snapshot())
    assert registry.plans_to_wake() == set()
    registry.forget("uid-a")
    assert registry.plans_to_wake() == {"uid-b"}
    assert registry.plans_to_wake() == set()


def test_claims_of_other_plans_reach_the_snapshot():
    registry, first, second = ClaimRegistry(), gated("a"), gated("b")
    registry.with_claims(first.own_snapshot())
    seen = registry.with_claims(second.own_snapshot())
    assert [(claim.plan_uid, dict(claim.wanted)) for claim in seen.other_claims] == [
        ("uid-a", {"n1": 2, "n2": 2, "n3": 2})
    ]
    registry.record_placement("uid-a")
    seen = registry.with_claims(second.own_snapshot())
    assert [dict(claim.held) for claim in seen.other_claims] == [{"n1": 2, "n2": 2, "n3": 2}]
    assert not placed_gangs(first)  # only the registry counts them as placed, until the plan is read again


def test_claims_are_complete_when_every_plan_of_the_start_was_read():
    registry = ClaimRegistry()
    assert not registry.is_complete
    registry.expect([("default", "a"), ("default", "b")])
    registry.record_pass(("default", "a"))
    registry.expect([("default", "c")])
    assert not registry.is_complete
    registry.record_pass(("default", "b"))
    assert registry.is_complete
