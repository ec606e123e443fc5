"""Timelines of trials: requested, stored with the report, and read by `trainwright trial`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from flow_reports import report_of
from flow_world import World, node, spec_of
from typer.testing import CliRunner

from trainwright import documents
from trainwright.cli import app
from trainwright.cluster import Device
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy
from trainwright.timeline import Action, Moment, RankTimeline, Timeline
from trainwright.worker_api import (
    MAX_REPORT_BYTES,
    RankMemory,
    TrialReport,
    TrialSeriesReport,
    TrialSeriesTask,
    TrialTask,
)
from trainwright_operator.api.spec import TrialsSpec
from trainwright_operator.flow.documents.outcome import parse_result
from trainwright_operator.flow.trials.trial_gangs import TRIAL_REPORT_BUDGET_BYTES, estimate_report_bytes

MODEL = "gpt: {layers: 4, hidden_size: 64, heads: 4, sequence_length: 64, vocabulary_size: 512}\nglobal_batch_size: 8\n"


def timeline_of(plan: Plan) -> Timeline:
    moments = (
        Moment(Action.FORWARD, 0, 0, 400_000),
        Moment(Action.WAIT, 0, 400_000, 100_000),
        Moment(Action.BACKWARD, 0, 500_000, 500_000),
    )
    return Timeline(1.0, tuple(RankTimeline(device.node, device.slot, moments) for device in plan.devices))


def report_with_timeline(order):
    found = report_of(order)
    if isinstance(order, TrialSeriesTask):
        trials = (report_with_timeline(order.trial_task(number)) for number in range(len(order.plans)))
        return TrialSeriesReport(tuple(trials))
    if isinstance(order, TrialTask) and order.timeline:
        return replace(found, timeline=timeline_of(order.plan))
    return found


def world_of(**trials: object) -> World:
    return World(
        spec=spec_of(search={"planner": "Amp"}, trials={"topK": 1, **trials}),
        nodes=(node("n1"), node("n2", "emulated-t4")),
        report=report_with_timeline,
    )


def kept(world: World, config_map: str, key: str) -> str:
    """Return stored data as `kubectl get configmap NAME -o jsonpath='{.data.KEY}'` prints it."""
    return world.stored[config_map].data[key]


@pytest.mark.parametrize("per_gang", [1, 2])
def test_command_reads_the_timeline_stored_by_the_operator(per_gang: int, tmp_path: Path) -> None:
    world = world_of(timeline=True, perGang=per_gang)
    status = world.run()
    candidates = json.loads(kept(world, status.candidates_ref.config_map, "document.json"))
    plans = {trial["name"]: json.dumps(trial["plan"]) for trial in candidates["trials"]}
    assert len(status.trials) >= 2
    plans[status.winner.trial] = json.dumps(status.dump()["winner"]["plan"])
    for trial in status.trials:
        files = {
            "cluster.json": kept(world, status.cluster_ref.config_map, "document.json"),
            "runtime.json": kept(world, status.cluster_ref.config_map, "runtime.json"),
            "profiles.json": kept(world, status.profiles_ref.config_map, "document.json"),
            "report.json": kept(world, trial.result_ref.config_map, "report.json"),
            "plan.json": plans[trial.name],
            "model.yaml": MODEL,
        }
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        options = [
            f"--{name.partition('.')[0]}={tmp_path / name}" for name in files
        ]  # one file per option, of the same name
        told = CliRunner().invoke(app, ["trial", *options, "--output", "json"])
        assert told.exit_code == 0, told.output
        assert json.loads(told.stdout)["predicted_seconds"] == pytest.approx(trial.predicted_seconds, rel=1e-4)
        unknown = [option for option in options if not option.startswith("--runtime")]
        plain = json.loads(CliRunner().invoke(app, ["trial", *unknown, "--output", "json"]).stdout)
        is_on_both_nodes = trial.accelerator is None
        # This world's collectives between nodes take a second each, so their measurement matters.
        assert plain["predicted_seconds"] < 0.95 * trial.predicted_seconds or not is_on_both_nodes
        trace = tmp_path / f"{trial.name}.json"
        done = CliRunner().invoke(app, ["trial", *options, "--trace", str(trace)])
        assert done.exit_code == 0, done.output
        assert "As measured, device by device" in done.output
        assert ("n2:1" in done.output) is is_on_both_nodes
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
        assert {event["name"].split()[0] for event in events} >= {"forward", "wait", "backward"}


def test_operator_does_not_read_stored_timelines() -> None:
    world = world_of(timeline=True)
    status = world.run()
    stored = world.stored[status.trials[0].result_ref.config_map]
    assert documents.loads(stored.data["report.json"], TrialReport).timeline is not None
    assert parse_result(stored).report.timeline is None


def test_no_timeline_is_recorded_by_default() -> None:
    world = world_of()
    status = world.run()
    report = documents.loads(kept(world, status.trials[0].result_ref.config_map, "report.json"), TrialReport)
    assert report.timeline is None


def test_timeline_requested_later_repeats_no_measurement() -> None:
    world = world_of()
    world.run()
    before = len(world.created)
    world.change(search={"planner": "Amp"}, trials={"topK": 1, "timeline": True})
    world.run()
    assert world.created[before:] == []


def wide(devices: int, name: str) -> Plan:
    used = tuple(Device(f"{name}-{number // 8}", number % 8) for number in range(devices))
    stages = tuple(Stage((device,), (LayerRun(layer, 1, Strategy(1, 1), (1,)),)) for layer, device in enumerate(used))
    return Plan(devices, 8, (Pipeline(8, 1, stages),))


@pytest.mark.parametrize(("devices", "plans", "iterations"), [(16, 5, 10), (16, 1, 9000), (240, 4, 100), (900, 1, 10)])
def test_report_with_timelines_fits_its_size_limit(devices: int, plans: int, iterations: int) -> None:
    from trainwright_worker.trial import MAX_MOMENTS

    limits = TrialsSpec(iterations=iterations, timeline=True)
    plan = wide(devices, "gpu-node.example")
    assert estimate_report_bytes([plan] * plans, limits) <= TRIAL_REPORT_BUDGET_BYTES
    moments = tuple(Moment(Action.TENSOR_SUM, 1000 + one, 10**7 + one, 10**6) for one in range(1000))
    ranks = tuple(RankTimeline(device.node, device.slot, moments, 10**5) for device in plan.devices)
    whole = Timeline(1.2345678901234567, ranks).at_most(MAX_MOMENTS // plans)
    seconds = (0.12345678901234567,) * (iterations + 3)
    memory = tuple(RankMemory(device.node, device.slot, 10**11) for device in plan.devices)
    one = TrialReport(seconds[3:], seconds, memory, 10**6, 10**4, whole)
    assert len(documents.dumps(TrialSeriesReport((one,) * plans))) < MAX_REPORT_BYTES


def test_no_timeline_is_recorded_when_devices_are_too_many() -> None:
    limits = TrialsSpec(timeline=True)
    assert estimate_report_bytes([wide(4096, "n")], limits) > TRIAL_REPORT_BUDGET_BYTES
    assert estimate_report_bytes([wide(4096, "n")], TrialsSpec()) <= TRIAL_REPORT_BUDGET_BYTES
