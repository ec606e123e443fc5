"""Reports: an unusable or void one is reported as such, and a late one is kept."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from flow_harm import fail_pods, run_with, running
from flow_reports import log_of, report_of
from flow_world import World, spec_of

from trainwright.worker_api import (
    MAX_REPORT_BYTES,
    PROGRESS_MARKER,
    REPORT_MARKER,
    Gang,
    GangNode,
    LinkTask,
    ProfilingTask,
    TrialReport,
    TrialTask,
)
from trainwright_operator.flow.gangs.results import assess_report


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (f"{REPORT_MARKER} not json\n", "not JSON"),
        (f'{REPORT_MARKER} {{"document": "TrialReport", "iteration_seconds": "fast"}}\n', "iteration_seconds"),
        (f'{REPORT_MARKER} {"[" * 600}"\\u001b"{"]" * 600}\n', "not JSON"),
        (f"{REPORT_MARKER} {'x' * (MAX_REPORT_BYTES + 1)}\n", "at most"),
        (f'{REPORT_MARKER} {{"document": "Cluster", "nodes": []}}\n', "Cluster"),
        (f'{REPORT_MARKER} {{"document": "Trial\\ud800Report", "iteration_seconds": "fast"}}\n', "iteration_seconds"),
    ],
)
def test_unusable_report_is_invalid(log: str, words: str) -> None:
    world = World(log=lambda order: log if isinstance(order, TrialTask) else None)
    world.run()
    assert world.trial("candidate-1").reason == "ReportInvalid"
    assert words in world.trial("candidate-1").message


@pytest.mark.parametrize(("done", "total", "what"), [(-1, 5, "rounds"), (1, -5, "rounds"), (1, 2**63, "rounds")])
def test_progress_that_no_status_can_hold_is_ignored(done: int, total: int, what: str) -> None:
    def report_progress(world: World) -> None:
        line = f'{PROGRESS_MARKER} {{"done": {done}, "total": {total}, "what": "{what}"}}\n'
        world.pods = {name: replace(pod, log=line) for name, pod in world.pods.items()}
        world.step(0.0)
        assert world.status.progress is not None
        assert world.status.progress.text == "0/1 measurement: running"

    assert run_with(World(), "links", report_progress).succeeded == "True"


def _with(kind: type, path: str, value: object) -> World:
    """Return a world whose workers of one kind report a value, at a path of their report's document."""

    def log(order: object) -> str | None:
        if not isinstance(order, kind):
            return None
        *head, last = log_of(report_of(order)).splitlines()
        document = json.loads(last.removeprefix(REPORT_MARKER))
        *parents, field = path.split(".")
        place = document
        for part in parents:
            place = place[int(part) if part.isdecimal() else part]
        place[int(field) if field.isdecimal() else field] = value
        return "\n".join((*head, f"{REPORT_MARKER} {json.dumps(document)}", ""))

    return World(log=log)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("memory.0.peak_bytes", -1, "memory.0.peak_bytes: must be at least 0, got -1"),
        ("memory.0.peak_bytes", 2**63, f"memory.0.peak_bytes: must be at most {2**63 - 1}, got {2**63}"),
        ("memory.0.slot", -1, "memory.0.slot: must be at least 0, got -1"),
        ("iteration_seconds.0", 1e-300, "iteration_seconds.0: must be at least 1e-09, got 1e-300"),
        ("iteration_seconds.0", 0, "iteration_seconds.0: must be at least 1e-09, got 0"),
        ("iteration_seconds.0", 1e23, "iteration_seconds.0: must be at most 1e+09, got 1e+23"),
        ("iteration_seconds", [], "iteration_seconds: expected at least one entry, got an empty list"),
        ("late_segments", -1, "late_segments: must be at least 0, got -1"),
    ],
)
def test_trial_report_beyond_its_bounds_is_invalid(path: str, value: object, words: str) -> None:
    world = _with(TrialTask, path, value)
    world.run()
    assert world.trial("candidate-1").reason == "ReportInvalid"
    assert world.trial("candidate-1").message.endswith(words)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("collectives.0.members", [], "collectives.0.members: expected at least one entry, got an empty list"),
        ("collectives.0.seconds", -1, "collectives.0.seconds: must be at least 0, got -1"),
        ("collectives.0.message_bytes", -1, "collectives.0.message_bytes: must be at least 0, got -1"),
    ],
)
def test_link_report_beyond_its_bounds_is_invalid(path: str, value: object, words: str) -> None:
    world = _with(LinkTask, path, value)
    world.run()
    assert world.condition("LinksMeasured").reason == "ReportInvalid"
    assert world.condition("LinksMeasured").message.endswith(words)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("process_bytes", -1, "process_bytes: must be at least 0, got -1"),
        ("layers.0.rows", 2**50, f"layers.0.rows: must be at most {2**40}, got {2**50}"),
        ("layers.0.peak_bytes", -1, "layers.0.peak_bytes: must be at least 0, got -1"),
        ("layers.0.parameter_bytes", 2**70, f"layers.0.parameter_bytes: must be at most {2**63 - 1}, got {2**70}"),
    ],
)
def test_profiling_report_beyond_its_bounds_is_invalid(path: str, value: object, words: str) -> None:
    world = _with(ProfilingTask, path, value)
    world.run()
    assert world.condition("Profiled").reason == "ReportInvalid"
    assert world.condition("Profiled").message.endswith(words)


def test_report_that_grows_beyond_a_config_map_when_it_is_stored_is_invalid() -> None:
    losses = ",".join(["1e9"] * 220_000)  # 880 kB, of which `1000000000.0` makes 2,860 kB

    def log(order: object) -> str | None:
        line = f'{REPORT_MARKER} {{"document":"TrialReport","iteration_seconds":[1],"losses":[{losses}]}}\n'
        assert len(line) < MAX_REPORT_BYTES
        return line if isinstance(order, TrialTask) else None

    world = World(log=log)
    world.run()
    assert world.trial("candidate-1").reason == "ReportInvalid"
    assert "bytes where it is stored, at most 900000 are allowed" in world.trial("candidate-1").message
    assert max(sum(map(len, one.data.values())) for one in world.stored.values()) < 2**20


def test_failure_keeps_its_reason_without_what_no_status_can_hold() -> None:
    message = '{"document": "Failure", "reason": "Hang", "message": "no \\ud800progress"}'
    world = run_with(World(), "links", lambda world: fail_pods(world, "links", termination_message=message))
    assert world.condition("LinksMeasured").reason == "Hang"
    assert world.condition("LinksMeasured").message.endswith(": no progress")


def test_values_that_no_gang_checked_are_told_beside_the_profiles() -> None:
    world = _with(ProfilingTask, "unchecked", ["values of Head (layer 9): the memory here is too small", "others"])
    world.run()
    told = world.condition("Profiled").message
    assert told.endswith("; not checked: values of Head (layer 9): the memory here is too small, and 1 more")


def test_profiles_that_two_reports_contain_are_invalid() -> None:
    def report(order):
        told = report_of(order)
        if not isinstance(order, ProfilingTask):
            return told
        return replace(told, layers=tuple(replace(layer, accelerator="same") for layer in told.layers))

    world = World(report=report)
    world.run()
    assert world.condition("Profiled").reason == "ReportInvalid"
    assert "is profiled 2 times" in world.condition("Profiled").message


def test_report_of_another_kind_is_invalid() -> None:
    links = report_of(LinkTask(Gang((GangNode("n1", (0,), "a"), GangNode("n2", (0,), "a")))))
    world = World(log=lambda order: log_of(links) if isinstance(order, TrialTask) else None)
    world.run()
    assert world.trial("candidate-1").reason == "ReportInvalid"


def test_trial_is_void_when_the_emulation_is_too_slow() -> None:
    def report(order):
        good = report_of(order)
        return replace(good, late_segments=11) if isinstance(order, TrialTask) else good

    world = World(report=report, spec=spec_of(trials={"maxFailed": 32}))
    status = world.run()
    found = world.trial("candidate-1")
    assert (found.state, found.reason) == ("Void", "EmulationTooSlow")
    assert found.measured_seconds is not None
    assert (world.succeeded, status.winner) == ("False", None)


@pytest.mark.parametrize(
    ("late", "ratio", "state"),
    [(11, None, "Void"), (11, 0.011, "Void"), (11, 0.01, "Succeeded"), (900, 0.0, "Succeeded"), (10, 0.5, "Succeeded")],
)
def test_late_computations_void_a_trial_if_they_are_many_and_late_by_much_together(late, ratio, state) -> None:
    report = replace(TrialReport((1.0,), (1.0,)), late_segments=late, paced_segments=1000, late_ratio=ratio)
    found = assess_report(report)
    assert found.state == state
    if ratio == 0.011:
        assert found.message.startswith(
            "11 of 1000 computations took longer than on the emulated device, by 1.1% of its time together (allowed: 1%)"
        )


def test_void_trial_is_repeated_once() -> None:
    runs = []

    def report(order):
        good = report_of(order)
        if not isinstance(order, TrialTask):
            return good
        runs.append(order.plan)
        return replace(good, late_segments=11) if len(runs) == 1 else good

    world = World(report=report)
    status = world.run()
    assert [found.state for found in status.trials] == ["Succeeded"] * 5
    assert runs[0] == runs[1]
    assert len(runs) == 6
    assert world.condition("TrialsCompleted").reason == "AllTrialsFinished"


def test_modified_result_is_rejected() -> None:
    world = World()
    world.run(until=lambda: any(name.endswith("-links-result") for name in world.stored))
    name = next(name for name in world.stored if name.endswith("-links-result"))
    world.stored[name] = replace(world.stored[name], data={"outcome.json": "{}"})
    world.run()
    found = world.condition("LinksMeasured")
    assert found.reason == "StoredDocumentInvalid"
    assert "the worker" not in found.message
    assert f"ConfigMap {name}: state: Field required: add it; delete that ConfigMap" in found.message


def test_trial_counts_its_time_when_other_pods_are_removed() -> None:
    world = World()
    world.run(until=lambda: running(world, "candidate-1"))
    world.pass_time(20)
    ended = [name for name, pod in world.pods.items() if pod.gang == "candidate-1" and not pod.reports]
    for name in ended:
        del world.pods[name]
    world.run()
    found = world.trial("candidate-1")
    assert found.state == "Succeeded"
    assert (found.end_time - found.start_time).total_seconds() >= 20


def test_report_counts_when_its_deadline_passed_without_an_operator() -> None:
    world = World()
    world.run(until=lambda: running(world, "candidate-1"))
    world.pass_time(20)
    world.pass_time(5000)
    world.run()
    assert world.trial("candidate-1").state == "Succeeded"
