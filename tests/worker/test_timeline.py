"""Timelines of measured iterations: each rank's actions, and bounds that messages imply for two ranks' clocks."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch

from trainwright import documents
from trainwright.cluster import Emulation
from trainwright.plan import Pipeline, Plan, Stage
from trainwright.report.measured_timeline import chrome_trace, measured_timeline
from trainwright.strategy import Sharding
from trainwright.timeline import Action, Moment, RankTimeline, Timeline, at_most, outermost
from trainwright.worker_api import MAX_REPORT_BYTES, TrialSeriesTask
from trainwright_worker import trial
from trainwright_worker.device import Clock
from trainwright_worker.executor.recorder import Recorder
from trainwright_worker.gang.rank_assignment import gang_devices

SLOW = Emulation(1e12, 0.03, 1e9)
"""Emulated device on which every layer takes 30 ms forward and 60 ms backward, whatever its rows."""


def emulated(gang):
    nodes = tuple(replace(node, accelerator="emulated-x") for node in gang.nodes)
    return replace(gang, nodes=nodes, emulations=(("emulated-x", SLOW),))


def of(rank: RankTimeline, *actions: Action) -> list[Moment]:
    return [moment for moment in rank.moments if moment.action in actions]


def with_runs(plan: Plan, **fields) -> Plan:
    """Return the plan with the given fields of the strategy replaced in all of its layer runs."""
    stages = tuple(
        Stage(stage.devices, tuple(run.with_strategy(**fields) for run in stage.layers))
        for stage in plan.pipelines[0].stages
    )
    return replace(plan, pipelines=(Pipeline(2, 4, stages),))


@pytest.mark.torch_processes
@pytest.mark.timed
@pytest.mark.timeout(120)
def test_ranks_of_a_pipeline_report_their_timeline(worker, make) -> None:
    """Two stages of two layers, two micro-batches."""
    gang = emulated(make.gang(1, 1))
    outcome = worker.local(make.trial(gang, track_memory=False, timeline=True, iterations=2))
    assert outcome.code == 0, outcome.errors
    (report,) = outcome.reports
    assert len(report.iteration_seconds) == 2
    timeline = report.timeline
    assert timeline.iteration_seconds > 0.9 * min(report.iteration_seconds)
    first, second = timeline.ranks
    assert [(rank.node, rank.slot, rank.omitted) for rank in timeline.ranks] == [("node-a", 0, 0), ("node-b", 0, 0)]
    passes = (Action.FORWARD, Action.BACKWARD)
    assert [moment[:2] for moment in of(first, *passes)] == [
        ("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)
    ]  # fmt: skip
    assert [moment[:2] for moment in of(second, *passes)] == [
        ("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)
    ]  # fmt: skip
    for rank in timeline.ranks:
        outer = outermost(rank.moments)
        for before, after in pairwise(outer):
            assert before.end_microseconds <= after.start_microseconds + 1
        assert outer[-1].end_microseconds <= 1e6 * timeline.iteration_seconds + 1
        # Unrecorded time is the loop's own overhead.
        told = sum(moment.length_microseconds for moment in outer)
        assert told > 0.8 * (outer[-1].end_microseconds - outer[0].start_microseconds)
        # On a busy machine a pass after a late one is shortened by its lateness, so that the pace is kept.
        computed = of(rank, *passes)
        due = accumulate((2 if moment.action is Action.FORWARD else 4) * 30_000 for moment in computed)
        for moment, asked in zip(computed, due, strict=True):
            assert moment.end_microseconds - computed[0].start_microseconds > 0.8 * asked
        assert len(of(rank, Action.UPDATE)) == 1
    # Clocks start at a barrier, whose skew is far below a device's computing time.
    forwards, backwards = of(first, Action.FORWARD), of(second, Action.BACKWARD)
    for sent, used in zip(forwards, of(second, Action.FORWARD), strict=True):
        assert used.start_microseconds > sent.end_microseconds - 20_000
    for sent, used in zip(backwards, of(first, Action.BACKWARD), strict=True):
        assert used.start_microseconds > sent.end_microseconds - 20_000
    # The second stage waits for its first micro-batch as long as the first stage computes it.
    waited = of(second, Action.WAIT)[0]
    assert waited.number == 0
    assert waited.length_microseconds > forwards[0].length_microseconds - 20_000
    _pictures_agree(timeline)


def _pictures_agree(timeline: Timeline) -> None:
    top, bottom = measured_timeline(timeline, 100).plain.splitlines()[:2]
    assert top.startswith("node-a:0 |F")
    assert bottom.startswith("node-b:0 |.")
    # Both stages' forwards take 6 times as long as the second stage's first wait.
    for line in (top, bottom):
        assert line.count("B") > 1.5 * line.count("F") > 0
    events = chrome_trace(timeline)["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == sum(len(rank.moments) for rank in timeline.ranks)
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"node-a", "node-b"}
    json.dumps(events)


@pytest.mark.torch_processes
@pytest.mark.timed
@pytest.mark.timeout(120)
def test_timeline_has_activities_nested_in_passes(worker, make) -> None:
    gang = emulated(make.gang(2))
    devices = gang_devices(gang)
    replicas, halves = make.plan(devices, data=2), make.plan(devices, tensor=2)
    plans = (with_runs(replicas, sharding=Sharding.ZERO3, recompute=True), replicas, halves)
    order = TrialSeriesTask(
        gang, make.model, plans, warmup_iterations=1, iterations=1, track_memory=False, timeline=True
    )
    outcome = worker.local(order)
    assert outcome.code == 0, outcome.errors
    saving, plain, divided = (trial.timeline for trial in outcome.reports[0].trials)
    for rank in saving.ranks:
        assert len(of(rank, Action.RECOMPUTE)) == 2 * 4  # micro-batches × layers
        passes = of(rank, Action.FORWARD, Action.BACKWARD)
        for inner in of(rank, Action.GATHER, Action.RECOMPUTE):
            assert any(
                outer.start_microseconds <= inner.start_microseconds <= inner.end_microseconds <= outer.end_microseconds
                for outer in passes
            )
        assert of(rank, Action.GATHER)
    for rank in plain.ranks:
        assert of(rank, Action.GRADIENTS)
        assert not of(rank, Action.RECOMPUTE, Action.TENSOR_SUM)
    for rank in divided.ranks:
        # Two blocks of two all-reduces, forward and backward of two micro-batches; the ends may have their own.
        assert len(of(rank, Action.TENSOR_SUM)) >= 2 * 2 * 2 * 2 - 4
        assert not of(rank, Action.GATHER)


def test_recorder_keeps_what_happens_while_it_is_enabled_but_for_short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1e-3, 2e-3, 4e-3, 5e-3, 6e-3, 6.01e-3])
    monkeypatch.setattr(Clock, "mark", lambda _: next(moments))
    recorder = Recorder(torch.device("cpu"))
    with recorder.action(Action.FORWARD, 0):
        pass
    recorder.begin()
    with recorder.action(Action.FORWARD, 1), recorder.action(Action.GATHER):
        pass
    with recorder.action(Action.WAIT, 0):
        pass
    assert recorder.end() == [Moment(Action.FORWARD, 1, 1_000, 4_000), Moment(Action.GATHER, -1, 2_000, 2_000)]
    with recorder.action(Action.FORWARD, 2):
        pass
    assert recorder.end() == []


def test_long_timeline_drops_nested_activities_first_then_its_middle() -> None:
    moments = []
    for number in range(10):
        moments.append(Moment(Action.FORWARD, number, 100 * number, 100))
        moments.append(Moment(Action.TENSOR_SUM, -1, 100 * number + 50, 50))
    assert at_most(moments, 20) == moments
    assert [moment.number for moment in at_most(moments, 19)] == list(range(10))
    assert [moment.number for moment in at_most(moments, 5)] == [0, 1, 2, 8, 9]
    whole = Timeline(0.1, tuple(RankTimeline("node-a", slot, tuple(moments)) for slot in range(2)))
    assert [rank.omitted for rank in whole.at_most(40).ranks] == [0, 0]
    assert [(len(rank.moments), rank.omitted) for rank in whole.at_most(20).ranks] == [(10, 10), (10, 10)]
    assert [(len(rank.moments), rank.omitted) for rank in whole.at_most(20).at_most(18).ranks] == [(9, 11), (9, 11)]


def test_the_largest_timeline_fits_into_a_report() -> None:
    moments = tuple(Moment(Action.TENSOR_SUM, 1000, 10_000_000 + n, 1_000_000) for n in range(trial.MAX_MOMENTS // 16))
    timeline = Timeline(100.0, tuple(RankTimeline("node-a", slot, moments) for slot in range(16)))
    text = documents.dumps(timeline)
    assert len(text) < MAX_REPORT_BYTES / 2
    assert documents.loads(text, Timeline) == timeline
