"""Figures that every table shows, the baselines, and what each type of node is worth."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner, Result

from trainwright import documents
from trainwright.accelerators import cluster_of
from trainwright.answer.baselines import heuristic_plans
from trainwright.answer.formats import stating_format
from trainwright.calibration import Trial, Trials
from trainwright.cli import app
from trainwright.plan import Plan
from trainwright.report.plan_figures import PlanFigures
from trainwright.report.units import seconds
from trainwright.search import Problem, run
from trainwright.throughput import throughput
from trainwright.worker_api import RankMemory, TrialReport

MODEL = """
gpt: {layers: 4, hidden_size: 1024, heads: 8, sequence_length: 512, vocabulary_size: 8192}
global_batch_size: 32
dtype: float16
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.yaml").write_text(MODEL)
    (tmp_path / "cluster.json").write_text(documents.dumps(cluster_of({"p3.8xlarge": 1, "g4dn.12xlarge": 1})))
    return tmp_path


def call(folder: Path, *words: str) -> Result:
    given = [f"--cluster={folder / 'cluster.json'}", f"--model={folder / 'model.yaml'}"]
    result = CliRunner().invoke(app, [*words, *given])
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def tried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with plans, a trial of each, and the report of one; it is the present folder, and the terminal has 60 columns."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.chdir(folder)
    answer = json.loads(call(folder, "plan", "--planner=megatron", "--top=3", "--output=json").stdout)
    plans = [documents.parse(one["plan"], Plan) for one in answer["candidates"]]
    trials = Trials(tuple(Trial(plan, 0.2, name=plan.summary()) for plan in plans))
    memory = tuple(RankMemory(device.node, device.slot, 10**9) for device in plans[0].devices)
    report = TrialReport((0.2, 0.21), (1.0,), memory)
    for name, noun in {"plan": plans[0], "trials": trials, "report": report}.items():
        (folder / f"{name}.json").write_text(documents.dumps(noun))
    return folder


def assert_fits(shown: str) -> None:
    assert max(map(cell_len, shown.splitlines())) <= 60, shown


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--planner=amp", "--top=5", "--objective=cost"),
        ("plan", "--planner=megatron", "--objective=cost", "--global-batch-size=search"),
        ("plan", "--planner=amp", "--node-worth"),
        ("compare", "megatron", "amp", "galvatron-base"),
        ("compare", "megatron", "--objective=cost", "--global-batch-size=search"),
        ("estimate", "--plan=pp2 dp2 tp2 mb1"),
        ("explain", "--plan=pp2 dp2 tp2 mb1 zero3 recompute"),
        ("export", "pp2 dp2 tp2 mb1 zero1", "--to=torchtitan", "--into=EXPORTED"),
        ("propose", "--planner=megatron", "--trials=trials.json"),
        ("trial", "--plan=plan.json", "--report=report.json"),
    ],
    ids=lambda words: words[0],
)
def test_tables_with_all_figures_fit_60_columns(tried: Path, words: tuple[str, ...]) -> None:
    shown = call(tried, *words).stdout
    assert_fits(shown)
    for heading in ("iteration", "tok/s/GPU", "MFU", "memory", "format"):
        assert heading in shown


def test_calibration_fits_60_columns(tried: Path) -> None:
    shown = call(tried, "calibrate", "--trials=trials.json", "--write=runtime.json").stdout
    assert "may be off by" in shown
    assert_fits(shown)


@pytest.mark.parametrize("command", ["accelerators", "machines", "runtimes"])
def test_lists_fit_60_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert_fits(CliRunner().invoke(app, [command]).stdout)


def test_trial_compares_the_figures_of_a_gpu(tried: Path) -> None:
    shown = call(tried, "trial", "--plan=plan.json", "--report=report.json").stdout
    cells = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.strip()}
    plan = documents.loads((tried / "plan.json").read_text(), Plan)
    rate = plan.global_batch_size * 512 / 0.205 / len(plan.devices)
    assert cells["tok/s/GPU"][0] == f"{rate:,.0f}"
    assert cells["memory"][0].startswith(f"{10**9 / 2**30:.1f}/1")
    assert cells["format"] == ["fp16", "fp16"]
    assert "Estimated from data sheets: " in " ".join(shown.split())


def test_figures_are_those_of_the_throughput(make_problem: Callable[..., Problem]) -> None:
    problem = make_problem()
    (candidate,) = run("amp", problem, top=1)
    found = PlanFigures.of(candidate, problem)
    expected = throughput([candidate.estimate.iteration_seconds], candidate.plan, problem.model, problem.cluster)
    assert expected.tokens_per_second is not None
    assert found.rate * len(candidate.plan.devices) == pytest.approx(expected.tokens_per_second)
    assert found.utilisation == expected.utilisation
    assert found.peak_bytes <= found.limit_bytes


def test_baselines_are_the_heuristic_on_all_devices_and_on_equal_ones(make_problem: Callable[..., Problem]) -> None:
    problem = make_problem()
    found = heuristic_plans([problem], 1)
    assert found.of_all == stating_format(run("megatron", problem, top=1)[0], problem)
    assert found.of_equal is not None
    assert {problem.cluster.node(node).accelerator for node in found.of_equal.plan.nodes} == {found.accelerator}
    assert found.better is not None
    seconds = [one.estimate.iteration_seconds for one in (found.of_all, found.of_equal)]
    assert found.better.estimate.iteration_seconds == min(seconds)


def test_cluster_of_equal_devices_has_one_baseline(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., object]
) -> None:
    found = heuristic_plans([make_problem(make_cluster([("fast", 2), ("fast", 2)]))], 1)
    assert (found.of_equal, found.accelerator) == (None, None)


@pytest.mark.parametrize(
    ("words", "what"), [(("plan", "--planner=amp"), "this plan"), (("compare", "megatron", "amp"), "the plan of amp")]
)
def test_json_has_the_times_of_the_sentence_on_the_heuristic(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], what: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    answer = json.loads(call(folder, *words, "--output=json").stdout)
    found = answer["heuristic"]
    best = min(one["predicted_seconds"] for one in answer.get("candidates") or answer["planners"])
    faster = min(found["seconds_on_all"], found["seconds_on_equal"])
    assert found["speedup"] == pytest.approx(faster / best)
    assert found["equal_accelerator"] == "Tesla-V100-SXM2-16GB"
    told = f"{seconds(found['seconds_on_all'])} on all GPUs and {seconds(found['seconds_on_equal'])} on the V100 alone"
    assert f"{told}; {what} is {found['speedup']:.2f} times" in call(folder, *words).stdout


def test_node_worth_is_the_answer_without_each_type_of_node(folder: Path) -> None:
    answer = json.loads(call(folder, "plan", "--planner=amp", "--top=1", "--node-worth", "--output=json").stdout)
    without = {one["accelerator"]: one for one in answer["node_worth"]}
    for name, one in without.items():
        other = json.loads(call(folder, "plan", "--planner=amp", "--top=1", f"--spare={name}", "--output=json").stdout)
        seconds = other["candidates"][0]["predicted_seconds"]
        assert one["without_seconds"] in (seconds, answer["candidates"][0]["predicted_seconds"])
    assert {name: one["devices"] for name, one in without.items()} == {"Tesla-V100-SXM2-16GB": 4, "Tesla-T4": 4}
    assert without["Tesla-V100-SXM2-16GB"]["price_per_hour"] == pytest.approx(12.24)


def test_propose_reads_what_plan_writes(folder: Path) -> None:
    answer = call(folder, "plan", "--planner=amp", "--top=3", "--node-worth", "--output=json").stdout
    (folder / "answer.json").write_text(answer)
    found = json.loads(call(folder, "propose", f"--candidates={folder / 'answer.json'}", "--output=json").stdout)
    assert found["verdict"] == "try"
