"""The command line around a long search: bad input is refused before it, and no answer is lost after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from quick_planner import quickly
from typer.testing import CliRunner, Result

from trainwright import documents
from trainwright.cli import app
from trainwright.search import SEARCHES, Problem
from trainwright.search.registry import SEARCH_MODULES

MODEL = """
gpt: {layers: 6, hidden_size: 128, heads: 4, sequence_length: 64, vocabulary_size: 1000}
global_batch_size: 16
"""
runner = CliRunner()


@pytest.fixture
def files(tmp_path: Path, make_problem: Callable[..., Problem]) -> Path:
    problem = make_problem(layers=6, batch=16)
    cluster = json.loads(documents.dumps(problem.cluster))
    for accelerator in cluster["accelerators"]:
        accelerator["price_per_hour"] = 1.0
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    (tmp_path / "model.yaml").write_text(MODEL)
    (tmp_path / "profiles.json").write_text(documents.dumps(problem.profiles))
    return tmp_path


def given(folder: Path) -> list[str]:
    names = {"--cluster": "cluster.json", "--model": "model.yaml", "--profiles": "profiles.json"}
    return [part for option, name in names.items() for part in (option, str(folder / name))]


def call(folder: Path, command: str, *more: str) -> Result:
    return runner.invoke(app, [*quickly(command), *given(folder), *more])


def refused(result: Result, code: int = 2) -> str:
    assert result.exit_code == code, result.output
    assert not result.stdout
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(*_: object) -> list[object]:
        raise AssertionError("nothing was to be searched")

    for name in SEARCHES:
        monkeypatch.setitem(SEARCHES, name, searched)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_search")
def test_an_unknown_planner_is_refused_before_the_others_search(files: Path) -> None:
    assert "unknown planner 'nobody'" in refused(call(files, "compare", "amp", "nobody"))


@pytest.mark.usefixtures("no_search")
def test_a_given_plan_is_explained_without_a_search(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SEARCH_MODULES:
        monkeypatch.setitem(SEARCH_MODULES, name, "not.to.be:loaded")  # type: ignore[index]
    explained = runner.invoke(app, ["explain", *given(files), "--plan", "pp2 dp2 tp2 mb1"])
    assert explained.exit_code == 0, explained.output
    assert "sets the pace" in " ".join(explained.stdout.split())


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("command", ["plan", "propose"])
@pytest.mark.parametrize(("place", "why"), [("", "Is a directory"), ("nowhere/plan.json", "No such file")])
def test_a_file_that_cannot_be_written_is_refused_before_the_search(
    files: Path, command: str, place: str, why: str
) -> None:
    told = refused(call(files, command, "--write-plan", str(files / place)), 1)
    assert "cannot be written into" in told
    assert why in told


def test_a_negative_seed_is_refused_by_its_name(files: Path) -> None:
    assert "--seed must be at least 0, got -1" in refused(call(files, "plan", "--planner", "random", "--seed", "-1"))


@pytest.mark.parametrize(
    "how",
    [
        ("--planner", "auto"),
        ("--objective", "cost"),
        ("--objective", "pareto"),
        ("--planner", "auto", "--budget-seconds", "0"),
        ("--planner", "alpa"),
        ("--tolerance", "0.5"),
    ],
)
def test_propose_reads_every_answer_of_plan(files: Path, how: tuple[str, ...]) -> None:
    answer = call(files, "plan", *how, "--top", "3", "--output", "json")
    assert answer.exit_code == 0, answer.output
    (files / "answer.json").write_text(answer.stdout)
    proposed = call(files, "propose", "--candidates", str(files / "answer.json"))
    assert proposed.exit_code == 0, proposed.output


def test_propose_reads_answers_with_the_fields_of_the_former_bound(files: Path) -> None:
    answer = json.loads(call(files, "plan", "--output", "json").stdout)
    del answer["work_bound_seconds"]
    answer |= {"lower_bound_seconds": 0.5, "gap": 0.1}
    (files / "answer.json").write_text(json.dumps(answer))
    proposed = call(files, "propose", "--candidates", str(files / "answer.json"))
    assert proposed.exit_code == 0, proposed.output


def test_propose_reads_the_answer_of_plan_with_a_kept_plan(files: Path) -> None:
    first = json.loads(call(files, "plan", "--output", "json").stdout)["candidates"][-1]["plan"]
    (files / "kept.json").write_text(json.dumps(first))
    answer = call(files, "plan", "--keep", str(files / "kept.json"), "--output", "json").stdout
    assert "moved_bytes" in answer
    (files / "answer.json").write_text(answer)
    assert call(files, "propose", "--candidates", str(files / "answer.json")).exit_code == 0


def test_plan_of_another_model_is_refused_naming_both_files(files: Path) -> None:
    plan = json.loads(call(files, "plan", "--top", "1", "--output", "json").stdout)["candidates"][0]["plan"]
    (files / "plan.json").write_text(json.dumps(plan))
    (files / "model.yaml").write_text(MODEL.replace("layers: 6", "layers: 8"))
    told = refused(call(files, "estimate", "--plan", str(files / "plan.json")))
    assert "plan.json: the plan is for a model of 8 layers, but that of" in told
    assert "model.yaml has 10" in told


@pytest.mark.parametrize("device", [{"node": "node-9", "slot": 0}, {"node": "node-4", "slot": 2}])
def test_plan_of_another_cluster_is_refused_naming_both_files_and_the_device(
    files: Path, device: dict[str, object]
) -> None:
    plan = json.loads(call(files, "plan", "--top", "1", "--output", "json").stdout)["candidates"][0]["plan"]
    plan["pipelines"][0]["stages"][-1]["devices"][-1] = device
    (files / "plan.json").write_text(json.dumps(plan))
    told = refused(call(files, "estimate", "--plan", str(files / "plan.json")))
    uses = f"uses device {device['node']}:{device['slot']}, which the cluster of {files / 'cluster.json'} lacks"
    assert "plan.json: the plan pp" in told
    assert f"{uses}; give the cluster that it was made for, or adapt it with `trainwright plan --keep" in told
    (files / "listed.json").write_text(json.dumps({"candidates": [{"plan": plan}]}))
    (files / "trials.json").write_text(json.dumps({"trials": [{"plan": plan, "iteration_seconds": 1.0}]}))
    for command, option, name in (
        ("propose", "--candidates", "listed.json"),
        ("propose", "--trials", "trials.json"),
        ("calibrate", "--trials", "trials.json"),
    ):
        told = refused(call(files, command, option, str(files / name)))
        assert told.startswith(f"trainwright: {files / name}: the plan ")
        assert uses in told


def test_answer_is_shown_when_the_terminal_has_no_columns(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert "Candidates of megatron" in call(files, "plan", "--planner", "megatron").stdout


def test_answer_is_complete_when_the_terminal_encodes_ascii_only(files: Path) -> None:
    program = [sys.executable, "-m", "trainwright", "plan", *given(files), "--planner", "megatron"]
    plain = {**os.environ, "PYTHONIOENCODING": "ascii"}
    table = subprocess.run(program, capture_output=True, env=plain, check=True).stdout.decode("ascii")
    assert "predicted, not measured" in table
    cluster = json.loads((files / "cluster.json").read_text())
    text = json.dumps(cluster).replace(cluster["nodes"][0]["name"], "knöten")
    (files / "cluster.json").write_text(text)
    done = subprocess.run([*program, "--output", "json"], capture_output=True, env=plain, check=True)
    assert "knöten" in json.dumps(json.loads(done.stdout), ensure_ascii=False)


def test_front_of_one_plan_is_reported_as_a_sentence(files: Path) -> None:
    cluster = json.loads((files / "cluster.json").read_text())
    cluster["nodes"] = [{**cluster["nodes"][0], "devices": 1}]
    (files / "cluster.json").write_text(json.dumps({**cluster, "links": []}))
    assert "One plan is both the fastest and the cheapest" in call(files, "plan", "--objective", "pareto").stdout
    assert "cost of 1000 rows" in call(files, "plan", "--objective", "pareto", "--top", "1").stdout


def test_explain_reports_when_the_budget_stopped_the_search(files: Path) -> None:
    shown = call(files, "explain", "--planner", "auto", "--budget-seconds", "0").stdout
    assert "The search was stopped by its budget" in " ".join(shown.split())
