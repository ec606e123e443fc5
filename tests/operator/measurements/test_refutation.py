"""Reused measurements that do not hold: a pod runs another image, or a node is of another speed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from flow_measurements import GPT, LINKS, PROFILES, SECOND, later, measured, measured_gangs, registry, spec, world
from flow_reports import report_of
from flow_world import World, node

from trainwright.worker_api import CheckedLayer, ProfilingTask, TrialSeriesTask, TrialTask
from trainwright_operator.api.status import RefutedStatus


def test_what_was_reused_is_measured_anew_once_a_pod_runs_another_image() -> None:
    second = later(measured(), image_id=registry(SECOND), spec=spec(trials={"topK": 1}))
    second.run()
    assert second.succeeded == "True", second.condition("Succeeded")
    assert measured_gangs(second) == LINKS + PROFILES
    assert second.status.cluster.revision == 2
    assert any(event.reason == "MeasurementsOutdated" and SECOND in event.message for event in second.events)
    assert second.status.cluster.refuted == RefutedStatus(images=1, speeds=0)
    assert second.status.cluster.revision_cause == "Image"
    third = later(second, "third", spec=second.spec)
    third.run()
    assert measured_gangs(third) == []
    assert third.status.cluster.revision == 1


def gpus() -> tuple[Any, ...]:
    names = {"n1": "Tesla-V100-SXM2-16GB", "n2": "Tesla-V100-SXM2-16GB", "n3": "Tesla-T4"}
    return tuple(replace(node(name, product), uid=f"uid-{name}") for name, product in names.items())


def slowed(world: World, **slow: float) -> World:
    """Multiply the seconds of layers on these nodes, in profiles and in checks."""

    def report(task: Any) -> Any:
        found = report_of(task)
        if isinstance(task, ProfilingTask):
            ratio = slow.get(task.gang.nodes[0].name, 1.0)
            layers = (replace(one, forward_seconds=ratio * one.forward_seconds, backward_seconds=ratio * one.backward_seconds)
                      for one in found.layers)  # fmt: skip
            return replace(found, layers=tuple(layers))
        if isinstance(task, TrialTask):
            checked = []
            for one in task.gang.nodes:
                base = next((check for check in task.checks if check.accelerator == one.accelerator), None)
                if base is not None:
                    seconds = 0.03 * base.rows * slow.get(one.name, 1.0)
                    checked.append(CheckedLayer(one.name, task.model.dtype, base.kind, base.rows, seconds))
            return replace(found, checked=tuple(checked))
        return found

    world.report = report
    return world


def speeds(world: World) -> dict[str, float]:
    """Return seconds over kept ones of nodes that differ."""
    ratios = {one.name: one.relative_seconds for one in world.status.cluster.nodes}
    return {name: round(ratio, 2) for name, ratio in ratios.items() if ratio is not None and abs(ratio - 1) > 0.01}


def test_node_whose_speed_drifted_is_noticed_and_measured_anew() -> None:
    tried = spec(trials={"topK": 1})
    first = slowed(world(nodes=gpus()))
    first.run()
    same = slowed(later(first, "same", spec=tried), n1=1.1, n2=0.9)
    same.run()
    assert measured_gangs(same) == []
    assert (same.succeeded, same.status.cluster.revision) == ("True", 1)
    other = slowed(later(first, "other", spec=spec(model={"gpt": GPT | {"hiddenSize": 128}})), n1=1.4, n2=1.4)
    other.run()  # its layers have the same names
    second = slowed(later(first, spec=tried), n2=1.4)
    second.run()
    assert (second.succeeded, second.status.cluster.revision) == ("True", 2)
    assert measured_gangs(second) == ["profile-1", "profile-2"], "links and the other type are as they were"
    assert second.status.cluster.refuted == RefutedStatus(images=0, speeds=1)
    assert second.status.cluster.revision_cause == "Speed"
    assert same.status.cluster.revision_cause is None
    assert same.status.cluster.refuted is None
    assert speeds(second) == {"n2": 1.4}
    assert speeds(same).items() >= {"n1": 1.1, "n2": 0.9}.items()
    told = next(event.message for event in second.events if event.reason == "MeasurementsOutdated")
    assert "n2 takes 1.40 times as long for block" in told
    nodes = [
        json.loads(one.data["key.json"])["node"][0] for name, one in second.measurements.items() if "profile-" in name
    ]
    assert nodes.count("n2") >= 2, "on that node"
    third = slowed(later(second, "third", spec=tried), n2=1.4)
    third.run()
    assert measured_gangs(third) == [], "each node is compared with itself"
    repaired = slowed(later(third, "repaired", spec=tried))
    repaired.run()
    assert measured_gangs(repaired) == ["profile-1", "profile-2"]


def test_drift_of_several_nodes_is_found_once() -> None:
    """One of them is measured anew; of the others nothing is kept, so that they are compared with that one."""
    tried = spec(trials={"topK": 1})
    first = slowed(world(nodes=gpus()))
    first.run()
    measured_on_both = slowed(later(first, "measured", spec=tried), n2=1.4)
    measured_on_both.run()
    second = slowed(later(measured_on_both, spec=tried), n1=2.0, n2=2.0)
    second.run()
    assert measured_gangs(second) == ["profile-1", "profile-2"]
    third = slowed(later(second, "third", spec=tried), n1=2.0, n2=2.0)
    third.run()
    assert measured_gangs(third) == []


def test_series_checks_nodes_once_and_emulated_devices_are_not_checked() -> None:
    asked: list[Any] = []

    def reused(first: World) -> World:
        second = later(first, spec=spec(trials={"perGang": 3}))
        second.report = lambda task: (asked.append(task), report_of(task))[1]
        second.run()
        return second

    first = world(nodes=gpus())
    first.run()
    reused(first)
    series = asked[0]
    assert isinstance(series, TrialSeriesTask)
    assert {(one.accelerator, one.kind) for one in series.checks} == {
        (name, "block") for name in {node.accelerator for node in series.gang.nodes}
    }
    assert [bool(series.trial_task(number).checks) for number in range(3)] == [True, False, False]
    asked.clear()
    reused(measured())
    assert not any(task.checks for task in asked)
