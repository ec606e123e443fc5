"""Documents too large for a ConfigMap that no phase waits for: none is sent, and the plan keeps what it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from flow_harm import running
from flow_reports import log_of, report_of
from flow_world import World, spec_of

from trainwright_operator.flow import actions as a
from trainwright_operator.flow import decide

NOTHING_FITS = 100
"""Limit that each document exceeds."""
CHANGED = {"settlingSeconds": 10, "replan": "OnClusterChange"}


def created(actions: Sequence[a.Action]) -> list[str]:
    return [action.name for action in actions if isinstance(action, a.CreateConfigMap)]


def wait(world: World, seconds: float) -> list[a.Action]:
    """Return what the operator does in this time."""
    return [action for _ in range(round(seconds / 5)) for action in world.step(5.0)]


def answered_without_a_node() -> World:
    """Return a plan with its answer whose node is gone since, but not for long enough to count."""
    world = World(spec=spec_of(**CHANGED))
    world.run()
    world.nodes = tuple(one for one in world.nodes if one.name != "n1")
    world.step(0.0)
    return world


def test_answered_plan_whose_next_discovery_does_not_fit_keeps_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    world = answered_without_a_node()
    answer, change = world.status.winner, world.status.cluster.change
    assert change is not None
    monkeypatch.setattr(decide, "MAX_BYTES", NOTHING_FITS)
    assert wait(world, 600) == []
    assert (world.succeeded, world.status.winner, world.status.cluster.change) == ("True", answer, change)
    assert world.status.cluster.revision == 1


def test_plan_is_made_anew_once_its_next_discovery_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    world = answered_without_a_node()
    with monkeypatch.context() as patched:
        patched.setattr(decide, "MAX_BYTES", NOTHING_FITS)
        wait(world, 60)
    world.run(until=lambda: world.status.cluster.revision == 2)
    world.run()
    assert world.succeeded == "True"


def test_expired_plan_is_deleted_although_its_next_discovery_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    world = answered_without_a_node()
    world.spec = spec_of(ttlSecondsAfterFinished=300, **CHANGED)
    monkeypatch.setattr(decide, "MAX_BYTES", NOTHING_FITS)
    wait(world, 400)
    assert world.deleted


def test_edit_of_a_plan_whose_next_discovery_does_not_fit_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = answered_without_a_node()
    monkeypatch.setattr(decide, "MAX_BYTES", NOTHING_FITS)
    wait(world, 60)
    world.change(trials={"maxFailed": 4}, **CHANGED)
    assert not created(wait(world, 60))
    found = world.condition("Succeeded")
    assert (found.status, found.reason) == ("False", "DocumentTooLarge")
    assert "-discovery-2 would have" in found.message
    assert "devices.max" in found.message
    assert not world.jobs


@pytest.mark.parametrize("gang", ["links", "profile-1", "candidate-1"])
def test_suspension_frees_devices_when_a_result_does_not_fit(gang: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.run(until=lambda: running(world, gang))
    for name, pod in world.pods.items():
        if pod.gang == gang:
            log = log_of(report_of(world.order_of(pod))) if pod.reports else pod.log
            world.pods[name] = replace(pod, log=log, phase="Succeeded")
    world.spec, world.generation = world.spec.model_copy(update={"suspend": True}), 2
    with monkeypatch.context() as patched:
        patched.setattr(decide, "MAX_BYTES", NOTHING_FITS)
        sent = created(wait(world, 30))
    assert not [name for name in sent if name.endswith("-result")]
    assert (world.jobs, world.pods) == ({}, {})
    world.spec, world.generation = world.spec.model_copy(update={"suspend": False}), 3
    world.run()
    assert world.succeeded == "True"
    assert sum(name.endswith(f"-{gang}-order") for name in world.created) == 2, "it is measured again"
