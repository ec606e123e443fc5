"""Baselines of trials: the heuristic on all devices, and on the type of device that is best for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flow_reports import report_of
from flow_world import World, node, spec_of

from trainwright import documents
from trainwright.cluster import Cluster
from trainwright.layer import Dtype
from trainwright.plan import Plan
from trainwright.worker_api import ProfilingReport, ProfilingTask, TrialTask, WorkerTask
from trainwright_operator.flow.documents.planned_trials import PlannedTrial, PlannedTrials
from trainwright_operator.flow.phases import planning

A100, V100, T4 = "NVIDIA-A100-SXM4-40GB", "emulated-v100", "emulated-t4"
MIXED = (node("n1"), node("n2"), node("n3", T4))
EQUAL = MIXED[:2]


def baselines(world: World) -> list[PlannedTrial]:
    world.run(until=lambda: world.status.candidates_ref is not None)
    assert world.status.candidates_ref is not None
    stored = world.stored[world.status.candidates_ref.config_map]
    found: PlannedTrials = documents.loads(stored.data["document.json"], PlannedTrials)
    return [trial for trial in found.trials if trial.counts_as_baseline]


def types(world: World, plan: Plan) -> set[str]:
    assert world.status.cluster_ref is not None
    cluster: Cluster = documents.loads(world.stored[world.status.cluster_ref.config_map].data["document.json"], Cluster)
    return {cluster.node(name).accelerator for name in plan.nodes}


def faster_on(accelerators: int) -> Any:
    """Return a worker whose plans take a second on that number of types of device, and else two."""

    def report(task: WorkerTask) -> Any:
        found = report_of(task)
        if not isinstance(task, TrialTask):
            return found
        used = {one.accelerator for one in task.gang.nodes if one.name in task.plan.nodes}
        return replace(found, iteration_seconds=(1.0 if len(used) == accelerators else 2.0,) * 2)

    return report


@pytest.mark.parametrize(
    "search", [{}, {"objective": "Cost"}, {"expressibleBy": "Megatron"}, {"planner": "Megatron"}], ids=str
)
def test_one_baseline_is_on_the_best_type_of_device_alone(search: dict[str, Any]) -> None:
    spec = spec_of(
        search={"planner": "Amp", "limits": {"maxTensorDegree": 2}, **search},
        devices={"pricesPerHour": {V100: 1.0, T4: 1.0}},
        links={"collectives": False},
    )
    world = World(nodes=MIXED, spec=spec)
    found = {frozenset(types(world, one.plan)): one.predicted_seconds for one in reversed(baselines(world))}
    assert set(found) == {frozenset({V100}), frozenset({V100, T4})} or "objective" in search  # no mix is as cheap
    without = baselines(World(nodes=EQUAL, spec=spec))
    assert found[frozenset({V100})] == pytest.approx(without[0].predicted_seconds)


def test_baselines_of_equal_devices_are_the_two_best_ones() -> None:
    world = World(nodes=EQUAL)
    found = baselines(world)
    assert len(found) == 2
    assert found[0].predicted_seconds < found[1].predicted_seconds
    world.run()
    assert world.status.winner is not None
    assert world.status.winner.baseline_accelerator is None
    assert {trial.accelerator for trial in world.status.trials} == {None}


@pytest.mark.parametrize("types_of_baseline", [1, 2])
def test_speedup_is_over_the_baseline_measured_faster_and_says_on_what_it_is(types_of_baseline: int) -> None:
    world = World(nodes=MIXED, report=faster_on(types_of_baseline))
    winner = world.run().winner
    assert winner is not None
    took = {trial.accelerator: trial.measured_seconds for trial in world.status.trials if trial.role == "Baseline"}
    assert took == {V100: types_of_baseline, None: 3 - types_of_baseline}
    assert winner.speedup_over_baseline == 1.0
    assert winner.baseline_accelerator == (V100 if types_of_baseline == 1 else None)
    where = f" on {V100} alone" if types_of_baseline == 1 else ""
    assert f"1.00 × as fast as the baseline{where} (emulated" in world.condition("Succeeded").message


def test_only_baseline_is_the_faster_one(monkeypatch: pytest.MonkeyPatch) -> None:
    two = baselines(World(nodes=MIXED))
    monkeypatch.setattr(planning, "BASELINE_COUNT", 1)
    (one,) = baselines(World(nodes=MIXED))
    assert one.predicted_seconds == min(each.predicted_seconds for each in two)


def test_baseline_on_one_type_is_in_the_format_that_is_best_there() -> None:
    def report(task: WorkerTask) -> Any:
        found = report_of(task)
        if not isinstance(found, ProfilingReport) or not isinstance(task, ProfilingTask):
            return found
        ratio = 0.5 if task.gang.nodes[0].accelerator == V100 else 0.7 if task.model.dtype is Dtype.BFLOAT16 else 1.0
        return ProfilingReport(
            tuple(
                replace(one, forward_seconds=ratio * one.forward_seconds, backward_seconds=ratio * one.backward_seconds)
                for one in found.layers
            )
        )

    spec = spec_of(training={"globalBatchSize": 8, "dtype": "auto"})
    world = World(nodes=(node("n1", A100), node("n2", V100)), report=report, spec=spec)
    found = {(frozenset(types(world, one.plan)), one.dtype) for one in baselines(world)}
    assert found == {(frozenset({A100}), Dtype.BFLOAT16), (frozenset({V100}), Dtype.FLOAT32)}
