"""Figures of measured trials, and the command that shows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright import documents
from trainwright.accelerators import cluster_of
from trainwright.cli import app
from trainwright.cluster import Cluster
from trainwright.families import T5, Gpt, Vit
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.report.iteration_chart import Activity
from trainwright.report.measured_timeline import chrome_trace, measured_timeline, spans
from trainwright.search import Problem
from trainwright.strategy import Strategy
from trainwright.throughput import flops_per_row, throughput, tokens_per_row
from trainwright.timeline import Action, Moment, RankTimeline, Timeline
from trainwright.worker_api import REPORT_MARKER, RankMemory, TrialReport, TrialSeriesReport

runner = CliRunner()


def test_model_flops_equal_the_usual_formula() -> None:
    """PaLM's appendix B: 6 FLOPs for each weight of a matrix product and token, 12 L h s for attention scores."""
    layers, hidden, tokens, vocabulary = 24, 1024, 512, 50_000
    model = Model.of(Gpt(layers, hidden, 16, tokens, vocabulary))
    weights = layers * 12 * hidden**2 + vocabulary * hidden
    expected = tokens * (6 * weights + 12 * layers * hidden * tokens)
    assert flops_per_row(model) == pytest.approx(expected, rel=1e-3)


def test_utilisation_uses_peaks_of_all_devices_in_the_models_format() -> None:
    cluster = cluster_of({"p3.8xlarge": 1, "g4dn.12xlarge": 1})
    model = Model.of(Gpt(24, 1024, 16, 512, 50_000), Dtype.FLOAT16)
    half = LayerRun(0, 13, Strategy(1, 4), (1, 1, 1, 1))
    stages = (
        Stage(cluster.devices[:4], (half,)),
        Stage(cluster.devices[4:], (replace(half, first=13),)),
    )
    plan = Plan(26, 32, (Pipeline(8, 4, stages),))
    found = throughput([2.2, 2.0, 2.1], plan, model, cluster)
    assert found.iteration_seconds == 2.1
    assert found.spread_seconds == pytest.approx(0.2)
    assert found.rows_per_second == pytest.approx(32 / 2.1)
    assert found.tokens_per_second == pytest.approx(32 * 512 / 2.1)
    # The data sheets' 125 TFLOP/s of a V100 and 65 of a T4.
    assert found.utilisation == pytest.approx(32 * flops_per_row(model) / 2.1 / (4 * 125e12 + 4 * 65e12))
    slower = throughput([4.2], plan, model, cluster)
    assert found.utilisation == pytest.approx(2 * (slower.utilisation or 0.0))
    whole = throughput([2.1], plan, replace(model, dtype=Dtype.FLOAT32), cluster)
    assert (whole.utilisation or 0.0) > 4 * (found.utilisation or 1.0)
    unknown = Cluster(
        (replace(cluster.accelerators[0], name="unheard-of"), *cluster.accelerators[1:]),
        (replace(cluster.nodes[0], accelerator="unheard-of"), *cluster.nodes[1:]),
    )
    assert throughput([2.1], plan, model, unknown).utilisation is None
    with pytest.raises(ValueError, match="at least one measured iteration"):
        throughput([], plan, model, cluster)


def test_tokens_are_counted_when_rows_have_tokens() -> None:
    assert tokens_per_row(T5(2, 64, 4, sequence_length=100, decoder_sequence_length=30)) == 130
    assert tokens_per_row(Vit(2, 64, 4)) is None


def test_nested_activity_interrupts_its_pass_in_the_chart() -> None:
    moments = [
        Moment(Action.WAIT, 0, 0, 10),
        Moment(Action.FORWARD, 0, 10, 50),
        Moment(Action.GATHER, -1, 20, 10),
        Moment(Action.TENSOR_SUM, -1, 30, 10),
        Moment(Action.GATHER, -1, 50, 10),
        Moment(Action.BACKWARD, 0, 60, 10),
    ]
    assert [(round(1e6 * one.start), round(1e6 * one.end), one.activity) for one in spans(moments)] == [
        (10, 20, Activity.FORWARD),
        (20, 30, Activity.GRADIENTS),
        (30, 50, Activity.FORWARD),
        (50, 60, Activity.GRADIENTS),
        (60, 70, Activity.BACKWARD),
    ]


def test_chart_has_a_line_per_device_and_counts_the_rest() -> None:
    ranks = tuple(RankTimeline("node", slot, (Moment(Action.FORWARD, 0, 0, 500_000),), slot % 2) for slot in range(50))
    lines = measured_timeline(Timeline(1.0, ranks), 60).plain.splitlines()
    assert len({len(line) for line in lines[:48]}) == 1

    assert lines[0].count("F") == pytest.approx(lines[0].count("."), abs=1)
    assert "2 devices more" in lines[48]
    assert "25 moments" in lines[49]
    events = chrome_trace(Timeline(1.0, ranks))["traceEvents"]
    assert [event["dur"] for event in events if event["ph"] == "X"] == [500_000] * 50


@pytest.fixture
def trial_files(tmp_path: Path, make_problem: Callable[..., Problem], make_plan: Callable[..., Plan]) -> Path:
    """Cluster, model, profiles and plan of two stages; `report.json` with a timeline."""
    problem = make_problem()
    plan = make_plan(problem, (7, 7))
    (tmp_path / "cluster.json").write_text(documents.dumps(problem.cluster))
    (tmp_path / "model.yaml").write_text(
        "gpt: {layers: 12, hidden_size: 128, heads: 4, sequence_length: 64, vocabulary_size: 1000}\n"
        f"global_batch_size: {plan.global_batch_size}\n"
    )
    (tmp_path / "profiles.json").write_text(documents.dumps(problem.profiles))
    (tmp_path / "plan.json").write_text(documents.dumps(plan))
    moments = (Moment(Action.FORWARD, 0, 0, 400_000), Moment(Action.BACKWARD, 0, 400_000, 600_000))
    ranks = tuple(RankTimeline(device.node, device.slot, moments) for device in plan.devices)
    memory = tuple(RankMemory(device.node, device.slot, 10**8) for device in plan.devices)
    measured = TrialReport((1.1, 1.0, 0.9), (3.0,), memory, 10, 0, Timeline(1.0, ranks))
    (tmp_path / "report.json").write_text(documents.dumps(measured))
    return tmp_path


def call(folder: Path, *more: str) -> Sequence[str]:
    named = [f"--{name.partition('.')[0]}={folder / name}" for name in ("cluster.json", "model.yaml", "profiles.json")]
    return ["trial", *named, f"--plan={folder / 'plan.json'}", *more]


def test_trial_command_prints_figures_and_both_timelines(trial_files: Path) -> None:
    trace = trial_files / "trace.json"
    report = f"--report={trial_files / 'report.json'}"
    result = runner.invoke(app, call(trial_files, report, f"--trace={trace}"))
    assert result.exit_code == 0, result.output
    for words in (
        "device times emulated",
        "tokens a second",
        "MFU",
        "As measured",
        "As predicted",
        "memory",
    ):
        assert words in result.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["name"] for event in events} == {"process_name", "thread_name", "forward 0", "backward 0"}
    fields = json.loads(runner.invoke(app, call(trial_files, report, "--output=json")).stdout)
    measured = fields["measured"]
    assert (measured["iteration_seconds"], measured["iterations"]) == (1.0, 3)
    assert measured["tokens_per_second"] == 64 * measured["rows_per_second"]
    assert measured["utilisation"] > 0
    assert fields["prediction_error"] == pytest.approx(fields["predicted_seconds"] - 1)
    assert fields["peak_memory_bytes"] == 10**8


def test_report_is_found_in_a_log_and_a_missing_timeline_is_reported(trial_files: Path) -> None:
    found = documents.loads((trial_files / "report.json").read_text(), TrialReport)
    log = trial_files / "worker.log"
    line = f"{REPORT_MARKER} {documents.dumps(replace(found, timeline=None))}\n"
    log.write_text(f"starting\n{line}done\n")
    result = runner.invoke(app, call(trial_files, f"--report={log}"))
    assert result.exit_code == 0, result.output
    assert "no timeline" in result.stderr
    refused = runner.invoke(app, call(trial_files, f"--report={log}", f"--trace={trial_files / 'trace.json'}"))
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "set `trials.timeline: true` in the TrainingPlan" in refused.stderr
    log.write_text(line + line)
    assert "holds 2 reports" in runner.invoke(app, call(trial_files, f"--report={log}")).stderr


def test_a_report_of_other_devices_or_of_a_whole_gang_and_a_log_without_one_are_refused(trial_files: Path) -> None:
    found = documents.loads((trial_files / "report.json").read_text(), TrialReport)
    report = trial_files / "other.json"

    def refusal(text: str) -> str:
        report.write_text(text)
        result = runner.invoke(app, call(trial_files, f"--report={report}"))
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        return result.stderr

    fewer = replace(found, timeline=None, memory=found.memory[1:])
    told = refusal(documents.dumps(fewer))
    assert f"{found.memory[0].node}:{found.memory[0].slot} is in only one of them; give the plan that was tried" in told
    assert "holds 2 trials of one gang" in refusal(documents.dumps(TrialSeriesReport((found, found))))
    assert "holds no report (no line begins with TRAINWRIGHT-REPORT)" in refusal("starting\nTRAINWRIGHT-PROGRESS {}\n")
