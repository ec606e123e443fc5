"""Rounds of a series, and measurements that other programs disturbed."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainwright.worker_api import TrialReport, TrialSeriesTask, TrialTask
from trainwright_worker import cpu_load, trial

CPU = torch.device("cpu")


class Machine:
    """Stand-in of `measure_trial`: notes what it measures, and is disturbed as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, disturbed: dict[str, list[float]]) -> None:
        self.measured: list[tuple[str, int, bool]] = []
        self.written: list[int] = []
        self._disturbed = disturbed
        monkeypatch.setattr(trial, "measure_trial", self.measure)
        monkeypatch.setattr(trial, "ProcessGroups", lambda _: SimpleNamespace(close=lambda: None))
        monkeypatch.setattr(trial.report_writer, "write_series_part", lambda number, _: self.written.append(number))
        monkeypatch.setattr(trial.report_writer, "write_progress", lambda *_: None)

    def measure(self, task: Any, *_: object) -> TrialReport:
        self.measured.append((task.plan, task.iterations, task.track_memory))
        shares = self._disturbed.get(task.plan, [])
        number = len([each for each in self.measured if each[0] == task.plan])
        cores = shares[number - 1] if number <= len(shares) else 0.0
        return TrialReport((float(number),) * task.iterations, (2.0,), disturbing_cores=cores)


def series(*plans: str, iterations: int = 10) -> Any:
    return TrialSeriesTask(None, None, plans, iterations=iterations)  # type: ignore[arg-type]


def run(task: Any) -> tuple[TrialReport, ...]:
    assignment = SimpleNamespace(is_main_process=True)
    return trial.run_series(task, assignment, CPU, None, timedelta()).trials  # type: ignore[arg-type]


def test_plans_are_measured_in_turns_and_have_as_many_iterations_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {})
    reports = run(series("a", "b", "c"))
    assert [plan for plan, _, _ in machine.measured] == ["a", "b", "c"] * 3
    assert [iterations for plan, iterations, _ in machine.measured if plan == "a"] == [4, 3, 3]
    assert [tracks for plan, _, tracks in machine.measured if plan == "a"] == [True, False, False]
    assert [len(report.iteration_seconds) for report in reports] == [10, 10, 10]
    assert machine.written == [0, 1, 2]


def test_plan_alone_and_few_iterations_have_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {})
    run(series("a"))
    run(series("b", "c", iterations=2))
    assert machine.measured == [("a", 10, True), *[(plan, 1, tracks) for tracks in (True, False) for plan in "bc"]]


def test_disturbed_rounds_are_repeated_and_the_quietest_count(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {"b": [0.0, 1.5, 0.1]})
    first, second = run(series("a", "b"))
    assert [plan for plan, _, _ in machine.measured] == ["a", "b"] * 3 + ["b"]
    assert set(second.iteration_seconds) == {1.0, 3.0, 4.0}
    assert not first.is_disturbed
    assert not second.is_disturbed


def test_plan_that_stays_disturbed_is_repeated_twice_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {"b": [1.0] * 9})
    _, second = run(series("a", "b"))
    assert len([plan for plan, _, _ in machine.measured if plan == "b"]) == 5
    assert second.is_disturbed
    assert "Other programs took 1.0 cores" in second.remark


def test_disturbed_trial_alone_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {"a": [0.9]})
    task: Any = TrialTask(None, None, "a")  # type: ignore[arg-type]
    report = trial.run_trial(task, None, CPU, None, timedelta())  # type: ignore[arg-type]
    assert [tracks for _, _, tracks in machine.measured] == [True, False]
    assert (set(report.iteration_seconds), report.is_disturbed) == ({2.0}, False)


STAT = "cpu  1 2 3\ncpu0 100 0 50 900 7 0 0 50 5 5\ncpu1 10 20 30 40 50 60 70 80 90 99\nintr 5\n"


def test_busy_time_counts_the_cores_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_load.os, "sysconf", lambda _: 100)
    monkeypatch.setattr(cpu_load.os, "sched_getaffinity", lambda _: {0})
    assert cpu_load.busy_seconds(STAT) == 2.0  # user 1, system .5, stolen by the host .5


@pytest.mark.parametrize(("cores", "expected"), [(2, 0.5), (4, 0.0)])
def test_cores_that_the_devices_leave_free_disturb_nobody(
    monkeypatch: pytest.MonkeyPatch, cores: int, expected: float
) -> None:
    monkeypatch.setattr(cpu_load.os, "sched_getaffinity", lambda _: set(range(cores)))
    assert cpu_load.disturbing_cores(2.5, 2.0, devices=2) == expected
