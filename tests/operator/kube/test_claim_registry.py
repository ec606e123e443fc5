"""Claims of all plans: who is woken when a node is released, and when they are complete after a start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import pytest
from flow_api import MemoryApi
from flow_cluster import SharedWorld, placed_gangs, plan, share
from flow_world import node, spec_of
from prometheus_client import CollectorRegistry

from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.phases.discovery import inspect_nodes
from trainwright_operator.kube.claim_registry import ClaimRegistry
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.health import Liveness
from trainwright_operator.kube.namespace_claims import NamespaceClaims
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.metrics import Metrics
from trainwright_operator.settings import Settings


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
    registry.record_placement(first.own_snapshot())
    seen = registry.with_claims(second.own_snapshot())
    assert [dict(claim.held) for claim in seen.other_claims] == [{"n1": 2, "n2": 2, "n3": 2}]
    assert not placed_gangs(first)  # only the registry counts them as placed, until the plan is read again


def refuse_template(world: SharedWorld) -> None:
    world.template_error = ("JobRefused", "exceeded quota")
    world.restart()
    world.generation += 1


def hide_a_field(world: SharedWorld) -> None:
    world.hidden_fields = ("spec.future",)


@pytest.mark.parametrize("stop", [refuse_template, hide_a_field])
def test_gangs_of_a_plan_that_cannot_go_on_hold_no_place_in_the_queue(stop: Callable[[SharedWorld], None]):
    first, second = plan("a"), plan("b")
    for world in (first, second):
        world.foreign = {"n1": 2}
    share(first, second)
    for _ in range(10):
        first.step(1.0)
    for _ in range(10):
        second.step(1.0)
    stop(first)
    first.foreign = second.foreign = {}
    for _ in range(3):
        first.step(1.0)
    registry = ClaimRegistry()
    registry.with_claims(first.own_snapshot())
    assert not registry.with_claims(second.own_snapshot()).other_claims
    second.run()
    assert second.succeeded == "True"
    assert not placed_gangs(first)
    first.template_error, first.hidden_fields = ("", ""), ()
    first.run()
    assert first.succeeded == "True"


def test_plan_of_a_namespace_that_another_release_took_leaves_the_queue(monkeypatch: pytest.MonkeyPatch):
    async def other_holder(*_: object) -> str:
        return "two-system/trainwright"

    async def others_of(waiting: SharedWorld, lost: SharedWorld) -> int:
        api = cast(Api, MemoryApi({}))
        reconciler = Reconciler(api, Settings(), Metrics(CollectorRegistry()), Liveness())
        reconciler._claims.with_claims(lost.own_snapshot())
        assert await reconciler._seconds_untouched(lost.own_snapshot().plan)
        return len(reconciler._claims.with_claims(waiting.own_snapshot()).other_claims)

    monkeypatch.setattr(NamespaceClaims, "other_holder", other_holder)
    assert asyncio.run(others_of(gated("a"), gated("b"))) == 0


def test_metric_names_the_release_that_has_the_namespace_and_the_plan_is_not_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[str | ApiError] = ["two-system/trainwright", ApiError(403, "forbidden"), ""]

    async def other_holder(*_: object) -> str:
        found = answers.pop(0)
        if isinstance(found, ApiError):
            raise found
        return found

    async def story() -> list[list[str]]:
        registry, api = CollectorRegistry(), MemoryApi({})
        reconciler = Reconciler(cast(Api, api), Settings(), Metrics(registry), Liveness())
        told = []
        while answers:
            with suppress(ApiError):
                await reconciler._seconds_untouched(plan("a").own_snapshot().plan)
            (family,) = (one for one in registry.collect() if one.name == "trainwright_plan_unclaimed")
            told.append([one.labels["release"] for one in family.samples])
        assert not api.writes
        return told

    monkeypatch.setattr(NamespaceClaims, "other_holder", other_holder)
    assert asyncio.run(story()) == [["two-system/trainwright"], [""], []]


def test_claims_are_complete_when_every_plan_of_the_start_was_read():
    registry = ClaimRegistry()
    assert not registry.is_complete
    registry.expect([("default", "a"), ("default", "b")])
    registry.record_pass(("default", "a"))
    registry.expect([("default", "c")])
    assert not registry.is_complete
    registry.record_pass(("default", "b"))
    assert registry.is_complete


def test_plans_choose_the_nodes_that_the_fewest_others_chose():
    registry = ClaimRegistry()
    nodes = tuple(node(f"n{number}") for number in range(1, 4))
    worlds = [SharedWorld(name=name, nodes=nodes, spec=spec_of(devices={"max": 2})) for name in "abcd"]

    def choose(world: SharedWorld) -> list[str]:
        snapshot = registry.with_claims(world.own_snapshot())
        found = inspect_nodes(snapshot, world.spec)
        registry.record_decision(snapshot, TrainingPlanStatus(cluster=found.status()))
        return [one.name for one in found.nodes]

    assert [choose(world) for world in worlds] == [["n1"], ["n2"], ["n3"], ["n1"]]
    registry.forget("uid-b")
    assert choose(SharedWorld(name="e", nodes=nodes, spec=worlds[0].spec)) == ["n2"]
    worlds[2].run()
    registry.record_decision(worlds[2].own_snapshot(), worlds[2].status)
    assert choose(SharedWorld(name="f", nodes=nodes, spec=worlds[0].spec)) == ["n3"], "the plan on it has its answer"
