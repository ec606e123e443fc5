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
from trainwright.cli import app
from trainwright.report.plan_figures import PlanFigures
from trainwright.report.units import seconds
from trainwright.search import Problem, run
from trainwright.search.baselines import baselines
from trainwright.throughput import throughput

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


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--planner=amp", "--top=5", "--objective=cost"),
        ("plan", "--planner=amp", "--node-worth"),
        ("compare", "megatron", "amp", "galvatron-base"),
        ("estimate", "--plan=pp2 dp2 tp2 mb1"),
        ("export", "pp2 dp2 tp2 mb1 zero1", "--to=torchtitan", "--into=EXPORTED"),
    ],
    ids=lambda words: words[0],
)
def test_tables_fit_60_columns(folder: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.chdir(folder)
    shown = call(folder, *words).stdout
    assert max(map(cell_len, shown.splitlines())) <= 60
    for heading in ("iteration", "tok/s/GPU", "MFU", "memory", "format"):
        assert heading in shown


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
    found = baselines(problem)
    assert found.of_all == run("megatron", problem, top=1)[0]
    assert found.of_equal is not None
    assert {problem.cluster.node(node).accelerator for node in found.of_equal.plan.nodes} == {found.accelerator}
    assert found.better is not None
    seconds = [one.estimate.iteration_seconds for one in (found.of_all, found.of_equal)]
    assert found.better.estimate.iteration_seconds == min(seconds)


def test_cluster_of_equal_devices_has_one_baseline(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., object]
) -> None:
    found = baselines(make_problem(make_cluster([("fast", 2), ("fast", 2)])))
    assert (found.of_equal, found.accelerator) == (None, None)


def test_json_has_the_times_of_the_sentence_on_the_heuristic(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    answer = json.loads(call(folder, "plan", "--planner=amp", "--top=1", "--output=json").stdout)
    found, best = answer["heuristic"], answer["candidates"][0]["predicted_seconds"]
    faster = min(found["seconds_on_all"], found["seconds_on_equal"])
    assert found["speedup"] == pytest.approx(faster / best)
    assert found["equal_accelerator"] == "Tesla-V100-SXM2-16GB"
    told = f"{seconds(found['seconds_on_all'])} on all GPUs and {seconds(found['seconds_on_equal'])} on the V100 alone"
    assert f"{told}; this plan is {found['speedup']:.2f} times" in call(folder, "plan", "--planner=amp").stdout


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
