"""Several trials in one gang: each keeps a result of its own, and what goes wrong is told of the right plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from flow_world import World, node, parts_of, pass_with_kills, report_of, spec_of
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright import documents
from trainwright.cluster import Device
from trainwright.orders import (
    REPORT_MARKER,
    Failure,
    FailureReason,
    SeriesOrder,
    SeriesReport,
    TrialOrder,
    TrialReport,
)
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright_operator.api.spec import TrialsSpec
from trainwright_operator.flow import trial_gangs, worker_log
from trainwright_operator.flow.actions import CreateConfigMap, StoredRole
from trainwright_operator.flow.book import Book
from trainwright_operator.flow.candidates import PlannedTrial, PlannedTrials, Role
from trainwright_operator.flow.discovery import inspect
from trainwright_operator.flow.outcome import Outcome
from trainwright_worker import acceptance

OUT_OF_MEMORY = documents.dumps(Failure(FailureReason.OUT_OF_MEMORY, "tried to allocate 3 GiB", rank=1))


def world_of(per_gang: int, annotations: dict[str, str] | None = None, **trials: object) -> World:
    """A small world, all of whose trials can be seen in a moment."""
    spec = spec_of(
        search={"planner": "Amp", "limits": {"maxTensorDegree": 1}},
        trials={"topK": 3, "perGang": per_gang, **trials},
    )
    nodes = (node("n1", devices=1), node("n2", "emulated-t4", devices=1))
    return World(spec=spec, nodes=nodes, annotations=annotations or {})


def gangs(world: World) -> list[str]:
    """The gangs of trials that were ordered, in their order."""
    orders = [name.removesuffix("-order").partition("-")[2] for name in world.created if name.endswith("-order")]
    known = [name.partition("-")[2] for name in orders]
    return [name for name in known if name.startswith(("candidate", "baseline"))]


def orders_of(world: World) -> list[TrialOrder | SeriesOrder]:
    """Collects what the workers of trials were ordered, and checks that they would take it."""
    found: list[TrialOrder | SeriesOrder] = []

    def seen(order) -> None:
        acceptance.check(order)
        if isinstance(order, TrialOrder | SeriesOrder):
            found.append(order)

    world.log = seen
    return found


def states(world: World) -> dict[str, str]:
    return {trial.name: str(trial.state) for trial in world.status.trials}


def run_breaking(world: World, is_broken: Callable[[Plan], bool], *, tells: bool = False, lags: float = 0.0) -> None:
    """Run to the end; pods that are to run a broken plan fail, whatever else they run.

    With `tells` the speaker has told of the trials before it; its own pod fails so many seconds after the others.
    """

    def look() -> bool:
        for name, pod in world.pods.items():
            since = pod.started_at or world.now
            running = (world.now - since).total_seconds()
            order = world.order_of(pod) if pod.phase == "Running" and running > 4 else None
            plans = order.plans if isinstance(order, SeriesOrder) else [getattr(order, "plan", None)]
            broken = next((number for number, plan in enumerate(plans) if plan is not None and is_broken(plan)), None)
            is_speaker = pod.job in world.masters and pod.role == "master"
            if broken is None or (is_speaker and running <= 4 + lags):
                continue
            ended = replace(pod.containers[0], running_since=None, started_at=pod.started_at,
                            finished_at=world.now, exit_code=1, termination_message=OUT_OF_MEMORY)  # fmt: skip
            log = None
            if is_speaker:
                told = report_of(order).trials[:broken] if isinstance(order, SeriesOrder) and tells else ()
                log = f"starting\n{parts_of(told)}"
            world.pods[name] = replace(pod, phase="Failed", containers=(ended,), log=log)
        return world.succeeded != "Unknown"

    world.run(until=look)


def planned_in(world: World) -> list[PlannedTrial]:
    world.run(until=lambda: bool(world.status.trials))
    document = world.stored[world.status.candidates_ref.config_map].data["document.json"]
    return list(documents.loads(document, PlannedTrials).trials)


def outcomes(world: World, names: Iterable[str]) -> list[Outcome]:
    base = next(iter(world.created)).rpartition("-")[0]
    return [documents.loads(world.stored[f"{base}-{name}-result"].data["outcome.json"], Outcome) for name in names]


def test_each_of_several_trials_in_a_gang_has_its_own_result() -> None:
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


def test_what_a_gang_took_is_divided_among_its_trials() -> None:
    world = world_of(per_gang=3)
    world.run()
    first, *others = outcomes(world, [f"{trial.name}s" for trial in world.status.trials[:3]])
    took = (first.ended_at - first.started_at).total_seconds()
    assert first.device_seconds == pytest.approx(2 * took / 3, rel=0.1)
    assert [other.device_seconds for other in others] == [first.device_seconds] * 2


def test_while_a_gang_runs_each_of_its_trials_says_with_whom() -> None:
    world = world_of(per_gang=2)
    world.run(until=lambda: "Running" in states(world).values())
    running = [trial for trial in world.status.trials if trial.state == "Running"]
    assert len(running) == 2
    assert running[0].message.startswith(f"with {running[1].name} in turn: ")
    assert all(trial.start_time is not None for trial in running)
    assert [trial.state for trial in world.status.trials[2:]] == ["Pending"] * 3


@settings(max_examples=12, deadline=None)
@given(per_gang=st.integers(1, 6), top_k=st.integers(1, 4), below=st.sampled_from([None, 1e-9]))
def test_the_answer_does_not_depend_on_how_many_run_in_a_gang(per_gang: int, top_k: int, below: float | None) -> None:
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


def test_the_failure_of_a_gang_is_told_of_the_plan_that_has_its_cause() -> None:
    world = world_of(per_gang=3)
    trials = planned_in(world)
    names = [trial.name for trial in trials]
    run_breaking(world, lambda plan: plan == trials[1].plan)
    assert gangs(world) == [f"{names[0]}s", *names[:3], f"{names[3]}s"]
    assert states(world) == {name: "Failed" if name == names[1] else "Succeeded" for name in names}
    failed = world.status.trials[1]
    assert (failed.reason, "tried to allocate 3 GiB" in failed.message) == ("OutOfMemory", True)
    assert world.condition("TrialsCompleted").message == "4 of 5 trials were measured"
    assert failed.result_ref.config_map.endswith(f"{names[1]}-result")
    # The series is no failed trial, but its device-seconds count.
    lost = outcomes(world, [f"{name}s" for name in names[:3]])
    assert {outcome.state for outcome in lost} == {"Failed"}
    assert sum(outcome.device_seconds for outcome in lost) > 0


@pytest.mark.parametrize("lags", [0.0, 8.0])
def test_what_was_measured_before_the_failure_is_not_measured_again(lags: float) -> None:
    world = world_of(per_gang=3)
    trials = planned_in(world)
    names = [trial.name for trial in trials]
    run_breaking(world, lambda plan: plan == trials[1].plan, tells=True, lags=lags)
    assert gangs(world) == [f"{names[0]}s", names[1], names[2], f"{names[3]}s"]
    assert states(world) == {name: "Failed" if name == names[1] else "Succeeded" for name in names}
    kept = world.stored[world.status.trials[0].result_ref.config_map].data
    assert documents.loads(kept["report.json"], TrialReport).iteration_seconds
    assert "log" not in kept


def test_parts_that_cannot_be_read_are_none() -> None:
    trial = TrialReport((1.0,), (2.0,))
    good = parts_of([trial, trial])
    cut = good[: len(good) - 20]
    assert worker_log.parts(f"noise\n{good}") == {0: trial, 1: trial}
    assert worker_log.parts(cut) == {0: trial}
    assert worker_log.parts("TRAINWRIGHT-PART {}\nTRAINWRIGHT-PART nonsense\n") == {}


def test_a_failed_gang_does_not_count_as_failed_trials() -> None:
    world = world_of(per_gang=5, maxFailed=0)
    struck = []

    def first_gang_only(plan: Plan) -> bool:
        struck.append(plan)
        return not any(name.endswith("s-result") and "candidate" in name for name in world.stored)

    run_breaking(world, first_gang_only)
    assert struck
    assert set(states(world).values()) == {"Succeeded"}
    assert len(gangs(world)) == 6


def late(report: TrialReport) -> TrialReport:
    return replace(report, late_segments=11)


@pytest.mark.parametrize(("is_late_alone", "state"), [(False, "Succeeded"), (True, "Void")])
def test_a_void_trial_of_a_gang_is_tried_once_more_alone(is_late_alone: bool, state: str) -> None:
    def report(order):
        found = report_of(order)
        if isinstance(found, SeriesReport) and len(found.trials) == 3:
            first, second, third = found.trials
            return SeriesReport((first, late(second), third))
        return late(found) if isinstance(found, TrialReport) and is_late_alone else found

    world = world_of(per_gang=3)
    world.report = report
    status = world.run()
    names = [trial.name for trial in status.trials]
    assert gangs(world) == [f"{names[0]}s", names[1], f"{names[3]}s"]
    assert [trial.state for trial in status.trials] == ["Succeeded", state, "Succeeded", "Succeeded", "Succeeded"]
    assert status.trials[1].measured_seconds is not None
    assert status.trials[1].result_ref.config_map.endswith(f"{names[1]}-result")


def test_a_trial_with_a_rehearsed_fault_goes_alone() -> None:
    world = world_of(3, {"trainwright.dev/rehearse-fault": "baseline-1=crash"})
    status = world.run()
    assert "baseline-1" in gangs(world)
    assert not any("baseline-1s" in name for name in world.created)
    assert {trial.name: trial.reason for trial in status.trials if trial.state == "Failed"} == {"baseline-1": "Crashed"}
    assert [len(name) for name in gangs(world) if name.endswith("s")]


def test_a_report_that_lacks_a_trial_is_not_used() -> None:
    def log(order) -> str | None:
        if not isinstance(order, SeriesOrder):
            return None
        return f"{REPORT_MARKER} {documents.dumps(SeriesReport(report_of(order).trials[1:]))}\n"

    world = world_of(per_gang=2)
    world.log = log
    world.run()
    names = [trial.name for trial in world.status.trials]
    assert {outcome.reason for outcome in outcomes(world, [f"{name}s" for name in names[:2]])} == {"ReportInvalid"}
    assert set(states(world).values()) == {"Succeeded"}


def test_an_operator_killed_between_any_two_actions_measures_nothing_twice() -> None:
    undisturbed = world_of(per_gang=3)
    expected = undisturbed.run().winner
    for seed in range(15):
        world = world_of(per_gang=3)
        pass_with_kills(world, random.Random(seed), likely=0.4, passes=600)
        winner = world.run().winner
        assert (winner.trial, winner.plan) == (expected.trial, expected.plan), seed
        assert sorted(world.created) == sorted(undisturbed.created), seed


def test_an_end_that_was_cut_short_is_kept_whole_from_the_same_pods() -> None:
    world = world_of(per_gang=3)

    def cut(todo) -> list:
        """Only the first of the results."""
        results = [one for one in todo if isinstance(one, CreateConfigMap) and one.role is StoredRole.RESULT]
        return results[:1] if len(results) == 3 else []

    kept: list = []
    while not kept:
        todo = world.decide()
        kept = cut(todo)
        world.apply(kept or todo)
        world.pass_time(2.0)
    world.restart()
    status = world.run()
    assert {trial.state for trial in status.trials} == {"Succeeded"}
    assert len(gangs(world)) == 2


def test_stopping_by_regret_works_between_gangs() -> None:
    def trials(per_gang: int) -> dict[str, object]:
        return {"topK": 8, "stopWhenRegretBelow": 0.2, "perGang": per_gang}

    worlds = [World(spec=spec_of(trials=trials(per_gang))) for per_gang in (1, 3)]
    one, three = (world.run() for world in worlds)
    assert [world.condition("TrialsCompleted").reason for world in worlds] == ["RegretIsSmall"] * 2
    made = [{trial.name for trial in status.trials if trial.state == "Succeeded"} for status in (one, three)]
    assert made[0] <= made[1]
    assert any(trial.reason == "RegretIsSmall" for trial in three.trials)
    assert three.winner.measured_seconds <= one.winner.measured_seconds


def test_device_hours_make_gangs_smaller_before_they_end_the_trials() -> None:
    hours = 2 * 70.0 / 3600  # two devices for little more than a minute
    world = world_of(per_gang=5, maxDeviceHours=hours, runDeadlineSeconds=60)
    status = world.run()
    assert gangs(world)[0] == f"{status.trials[0].name}s"
    assert len([trial for trial in status.trials[:2] if trial.state == "Succeeded"]) == 2
    assert all(name.count("-") == 1 for name in gangs(world))
    assert world.condition("TrialsCompleted").reason in ("AllTrialsFinished", "DeviceHoursExhausted")


def test_where_no_device_hours_are_left_the_trials_of_a_failed_gang_say_how_it_ended() -> None:
    world = world_of(per_gang=3, maxDeviceHours=2 * 95.0 / 3600, runDeadlineSeconds=60)
    planned_in(world)
    world.run_seconds = 1000.0
    status = world.run()
    assert len(gangs(world)) == 1
    assert {(trial.state, trial.reason) for trial in status.trials} == {("Skipped", "DeviceHoursExhausted")}
    for trial in status.trials[:3]:
        assert trial.message.startswith("not started alone; with others it ended so: DeadlineExceeded: not finished")
    assert {trial.message for trial in status.trials[3:]} == {"not started"}
    assert "with others it ended so: DeadlineExceeded" in world.condition("Succeeded").message


def test_what_is_begun_goes_on_when_the_number_is_edited() -> None:
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


def test_a_gang_that_found_no_devices_leaves_its_trials_to_be_tried_anew_after_an_edit() -> None:
    world = world_of(per_gang=5)
    world.run(until=lambda: bool(world.status.trials))
    world.others = {"n1": 1}
    world.run()
    assert world.succeeded == "False"
    world.others = {}
    world.change(
        search={"planner": "Amp", "limits": {"maxTensorDegree": 1}},
        trials={"topK": 3, "perGang": 5, "pendingDeadlineSeconds": 400},
    )
    world.run()
    assert set(states(world).values()) == {"Succeeded"}


def plan_on(*devices: Device) -> Plan:
    return Plan(6, 8, (Pipeline(4, 2, (Stage(devices, (LayerRun(0, 6, 1, len(devices), (1,) * len(devices)),)),)),))


def test_a_gang_holds_the_devices_of_all_its_plans() -> None:
    world = World(nodes=(node("n1"), node("n2"), node("n3", "emulated-t4")))
    book = Book(world.snapshot(), world.now)
    discovery = inspect(world.snapshot(), world.spec.devices, {})
    devices = [(Device("n2", 1), Device("n1", 0)), (Device("n2", 0), Device("n3", 1))]
    trials = [
        PlannedTrial(f"candidate-{rank}", Role.CANDIDATE, False, rank, rank, 1.0, 1, "", plan_on(*used))
        for rank, used in enumerate(devices, start=1)
    ]
    wanted = trial_gangs.series(book, discovery, trials, 100.0)
    assert [(one.name, one.slots) for one in wanted.order.gang.nodes] == [("n2", (0, 1)), ("n1", (0,)), ("n3", (1,))]
    assert (wanted.name, wanted.parts) == ("candidate-1s", ("candidate-1s", "candidate-2s"))
    assert len(wanted.order.gang.emulations) == 2


def test_no_more_trials_go_into_a_gang_than_its_report_has_room_for() -> None:
    plan = plan_on(Device("n1", 0), Device("n1", 1))
    few, many = TrialsSpec(iterations=10), TrialsSpec(iterations=10_000)
    assert trial_gangs.report_bytes([plan] * 32, few) < 100_000
    assert trial_gangs.report_bytes([plan] * 2, many) > 600_000
    world = world_of(per_gang=5, iterations=10_000)
    world.run()
    assert not [name for name in gangs(world) if name.endswith("s")]
