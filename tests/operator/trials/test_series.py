"""Trial series, several trials in one gang: each has its own result, and the answer is the same."""

from __future__ import annotations

import pytest
from flow_series import gangs, orders_of, outcomes, states, world_of
from flow_world import World, node, spec_of
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright import documents
from trainwright.cluster import Device
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy
from trainwright.worker_api import TrialReport
from trainwright_operator.api.spec import TrialsSpec
from trainwright_operator.flow.documents.planned_trials import PlannedTrial, Role
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.phases.discovery import inspect_nodes
from trainwright_operator.flow.trials import trial_gangs


def test_each_trial_of_a_series_has_its_own_result() -> None:
    world = world_of(per_gang=3)
    orders = orders_of(world)
    status = world.run()
    names = [trial.name for trial in status.trials]
    assert len(names) == 5
    assert gangs(world) == [f"{names[0]}s", f"{names[3]}s"]
    assert [len(order.plans) for order in orders] == [3, 2]
    assert set(states(world).values()) == {"Succeeded"}
    alone = world_of(per_gang=1).run()
    same = ("name", "measured_seconds", "peak_memory_bytes", "tokens_per_second", "reason", "message")
    for one, other in zip(status.trials, alone.trials, strict=True):
        assert [getattr(one, field) for field in same] == [getattr(other, field) for field in same]
        kept = world.stored[one.result_ref.config_map]
        report = documents.loads(kept.data["report.json"], TrialReport)
        assert report.iteration_seconds[0] == pytest.approx(one.measured_seconds)
    assert status.winner == alone.winner


def test_device_seconds_of_a_gang_are_divided_among_its_trials() -> None:
    world = world_of(per_gang=3)
    world.run()
    first, *others = outcomes(world, [f"{trial.name}s" for trial in world.status.trials[:3]])
    took = (first.ended_at - first.started_at).total_seconds()
    assert first.device_seconds == pytest.approx(2 * took / 3, rel=0.1)
    assert [other.device_seconds for other in others] == [first.device_seconds] * 2


def test_trials_of_a_running_series_name_each_other() -> None:
    world = world_of(per_gang=2)
    world.run(until=lambda: "Running" in states(world).values())
    running = [trial for trial in world.status.trials if trial.state == "Running"]
    assert len(running) == 2
    assert running[0].message.startswith(f"in a series with {running[1].name}: ")
    assert all(trial.start_time is not None for trial in running)
    assert [trial.state for trial in world.status.trials[2:]] == ["Pending"] * 3


@examples(12)
@given(per_gang=st.integers(1, 6), top_k=st.integers(1, 4), below=st.sampled_from([None, 1e-9]))
def test_winner_does_not_depend_on_the_series_length(per_gang: int, top_k: int, below: float | None) -> None:
    limits = {"topK": top_k} | ({"stopWhenRegretBelow": below} if below else {})
    world, plain = world_of(per_gang, **limits), world_of(1, topK=top_k)
    status, expected = world.run(), plain.run()
    assert status.winner == expected.winner
    assert {trial.name: trial.measured_seconds for trial in status.trials} == {
        trial.name: trial.measured_seconds for trial in expected.trials
    }
    assert len(gangs(world)) == -(-len(status.trials) // per_gang)
    assert world.jobs == {}
    assert not [name for name in world.stored if name.endswith("-order")]


def test_regret_threshold_stops_between_gangs() -> None:
    def trials(per_gang: int) -> dict[str, object]:
        return {"topK": 8, "stopWhenRegretBelow": 0.2, "perGang": per_gang}

    worlds = [World(spec=spec_of(trials=trials(per_gang))) for per_gang in (1, 3)]
    one, three = (world.run() for world in worlds)
    assert [world.condition("TrialsCompleted").reason for world in worlds] == ["RegretIsSmall"] * 2
    made = [{trial.name for trial in status.trials if trial.state == "Succeeded"} for status in (one, three)]
    assert made[0] <= made[1]
    assert any(trial.reason == "RegretIsSmall" for trial in three.trials)
    assert three.winner.measured_seconds <= one.winner.measured_seconds


def test_device_hours_shorten_series_before_they_end_the_trials() -> None:
    hours = 2 * 70.0 / 3600  # two devices for little more than a minute
    world = world_of(per_gang=5, maxDeviceHours=hours, runDeadlineSeconds=60)
    status = world.run()
    assert gangs(world)[0] == f"{status.trials[0].name}s"
    assert len([trial for trial in status.trials[:2] if trial.state == "Succeeded"]) == 2
    assert all(name.count("-") == 1 for name in gangs(world))
    assert world.condition("TrialsCompleted").reason in ("AllTrialsFinished", "DeviceHoursExhausted")


def test_running_series_continues_when_its_length_is_edited() -> None:
    def trials(per_gang: int) -> dict[str, object]:
        return {"search": {"planner": "Amp", "limits": {"maxTensorDegree": 1}},
                "trials": {"topK": 3, "perGang": per_gang}}  # fmt: skip

    for before, after in ((1, 3), (3, 1), (3, 2)):
        world = world_of(per_gang=before)
        world.run(until=lambda world=world: "Running" in states(world).values())
        begun = gangs(world)
        world.change(**trials(after))
        world.run()
        assert gangs(world)[: len(begun)] == begun
        assert len(world.created) == len(set(world.created))
        assert set(states(world).values()) == {"Succeeded"}


def plan_on(*devices: Device) -> Plan:
    return Plan(
        6, 8, (Pipeline(4, 2, (Stage(devices, (LayerRun(0, 6, Strategy(1, len(devices)), (1,) * len(devices)),)),)),)
    )


def test_gang_holds_the_devices_of_all_its_trials() -> None:
    world = World(nodes=(node("n1"), node("n2"), node("n3", "emulated-t4")))
    context = ReconcileContext(world.snapshot(), world.now)
    discovery = inspect_nodes(world.snapshot(), world.spec)
    devices = [(Device("n2", 1), Device("n1", 0)), (Device("n2", 0), Device("n3", 1))]
    trials = [
        PlannedTrial(f"candidate-{rank}", Role.CANDIDATE, False, rank, rank, 1.0, 1, "", plan_on(*used))
        for rank, used in enumerate(devices, start=1)
    ]
    wanted = trial_gangs.series_gang(context, discovery, trials, 100.0)
    assert [(one.name, one.slots) for one in wanted.task.gang.nodes] == [("n2", (0, 1)), ("n1", (0,)), ("n3", (1,))]
    assert (wanted.name, wanted.part_names) == ("candidate-1s", ("candidate-1s", "candidate-2s"))
    assert len(wanted.task.gang.emulations) == 2


def test_series_is_limited_by_the_report_size() -> None:
    plan = plan_on(Device("n1", 0), Device("n1", 1))
    few, many = TrialsSpec(iterations=10), TrialsSpec(iterations=10_000)
    assert trial_gangs.estimate_report_bytes([plan] * 32, few) < 100_000
    assert trial_gangs.estimate_report_bytes([plan] * 2, many) > 600_000
    world = world_of(per_gang=5, iterations=10_000)
    world.run()
    assert not [name for name in gangs(world) if name.endswith("s")]
