"""Limits of tenants: priority, seconds of grace, and plans of a namespace that are under way."""

from __future__ import annotations

from typing import Any

import pytest
from flow_harm import running
from flow_world import World, spec_of

from trainwright_operator.api.installation import InstallationRules, PodTemplateRule, TenantLimits

JOB = {"image": "lab/train:7", "command": ["train"]}
GRACE = "terminationGracePeriodSeconds"


def limited(spec: dict[str, Any], rule: PodTemplateRule = PodTemplateRule.RESTRICTED, **limits: int) -> World:
    return World(spec=spec_of(**spec), rules=InstallationRules(pod_template=rule, limits=TenantLimits(**limits)))


def test_priority_above_the_limit_waits_and_names_the_limit() -> None:
    world = limited({"priority": 11}, priority=10)
    for _ in range(3):
        world.step()
    accepted = world.condition("Accepted")
    assert (accepted.status, accepted.reason) == ("Unknown", "PriorityNotAllowed")
    assert accepted.message == (
        "spec.priority: has to be at most 10, got 11; lower it, or install the operator with a higher limits.maxPriority"
    )
    assert world.status.waiting is not None
    assert not world.created
    world.change(priority=10)
    assert world.run().winner is not None


def test_priority_above_the_limit_ends_at_the_deadline_of_waits() -> None:
    world = limited({"priority": 1, "waitDeadlineSeconds": 60}, priority=0)
    for _ in range(50):
        world.step()
    assert world.condition("Succeeded").reason == "WaitDeadlineExceeded"
    assert "has to be at most 0, got 1" in world.condition("Succeeded").message


@pytest.mark.parametrize("limit", [None, 1_000_000_000])
def test_priority_is_free_without_a_limit_and_up_to_it(limit: int | None) -> None:
    world = World(spec=spec_of(priority=1_000_000_000), rules=InstallationRules(limits=TenantLimits(priority=limit)))
    assert world.run().winner is not None


def worker(**probe: int) -> dict[str, Any]:
    return {"containers": [{"name": "pytorch", "livenessProbe": {"exec": {"command": ["true"]}, **probe}}]}


@pytest.mark.parametrize("rule", PodTemplateRule)
@pytest.mark.parametrize(
    ("field", "template"),
    [
        (GRACE, {GRACE: 61}),
        (f"containers[pytorch].livenessProbe.{GRACE}", worker(**{GRACE: 61})),
    ],
)
def test_longer_grace_than_the_limit_waits_whatever_templates_may_have(
    rule: PodTemplateRule, field: str, template: dict[str, Any]
) -> None:
    world = limited({"worker": {"podTemplate": {"spec": template}}}, rule, grace_seconds=60)
    world.step()
    assert world.condition("Accepted").reason == "PodTemplateNotAllowed"
    assert world.condition("Accepted").message == (
        f"spec.worker.podTemplate.spec.{field}: has to be at most 60, got 61; lower it, or install the operator with a higher "
        "limits.maxTerminationGracePeriodSeconds"
    )
    assert not world.created


@pytest.mark.parametrize("place", ["trials.framework", "job"])
def test_grace_of_jobs_of_users_is_limited_too(place: str) -> None:
    job = JOB | {"podTemplate": {"spec": {GRACE: 3600}}}
    framework = {"trials": {"topK": 1, "framework": job | {"stepTimeRegex": "took"}}}
    world = limited(framework if place == "trials.framework" else {"job": job}, grace_seconds=60)
    world.step()
    assert world.condition("Accepted").message.startswith(
        f"spec.{place}.podTemplate.spec.{GRACE}: has to be at most 60"
    )


def test_usual_pods_and_grace_up_to_the_limit_are_accepted() -> None:
    assert limited({}, grace_seconds=5).run().winner is not None
    assert limited({"worker": {"podTemplate": {"spec": {GRACE: 60}}}}, grace_seconds=60).run().winner is not None


def test_gang_that_runs_is_kept_when_the_limits_are_lowered() -> None:
    world = World(spec=spec_of(priority=5))
    world.run(until=lambda: running(world, "links"))
    world.rules = InstallationRules(limits=TenantLimits(priority=0))
    world.restart()
    for _ in range(20):
        world.step()
    assert world.condition("Accepted").reason == "PriorityNotAllowed"
    assert [pod.phase for pod in world.pods.values()] == ["Succeeded"] * 3
    world.change(priority=0)
    assert world.run().winner is not None
