"""Surface of `import trainwright`: what the page names, typed, loaded on first use, and equal to the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import trainwright as tw
from trainwright import documents
from trainwright.cli import app
from trainwright.exports import TARGETS, is_expressible
from trainwright.search import Objective
from trainwright.training import RequestedDtype

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "deploy" / "examples" / "planner"


@pytest.fixture
def problem() -> tw.Problem:
    return tw.problem(
        tw.read(EXAMPLES / "mixed-cluster.yaml", tw.Cluster), tw.read(EXAMPLES / "model.yaml", tw.Training)
    )


def test_page_names_the_whole_surface() -> None:
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)", page.partition("| --- |")[2])
    assert set(tw.__all__) <= set(named)
    assert all(hasattr(tw, name) for name in tw.__all__)
    assert not hasattr(tw, "unknown")
    assert dir(tw) == sorted(tw.__all__)


def test_import_loads_no_module_before_it_is_used() -> None:
    program = "import sys, trainwright; print([name for name in sys.modules if name.startswith('trainwright.')])"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "[]"


def test_library_finds_and_estimates_what_the_command_line_does(problem: tw.Problem) -> None:
    (best,) = tw.find_plans(problem, planner="amp")
    files = ["--cluster", str(EXAMPLES / "mixed-cluster.yaml"), "--model", str(EXAMPLES / "model.yaml")]
    asked = ["plan", *files, "--planner", "amp", "--output", "json"]
    answer = json.loads(CliRunner().invoke(app, asked).stdout)
    assert answer["candidates"][0]["predicted_seconds"] == best.estimate.iteration_seconds
    assert tw.estimate(best.plan, problem).iteration_seconds == best.estimate.iteration_seconds


def test_library_refuses_in_a_sentence(problem: tw.Problem, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="budget_seconds must be at least 0, got -1"):
        tw.find_plans(problem, planner="amp", budget_seconds=-1)
    by_cost = replace(problem, limits=replace(problem.limits, objective=Objective.COST))
    with pytest.raises(ValueError, match="node worth compares iterations of one batch"):
        tw.ask(by_cost, "amp", node_worth=True)
    training = replace(tw.read(EXAMPLES / "model.yaml", tw.Training), dtype=RequestedDtype.FLOAT16)
    limits = tw.Limits(expressible_by=TARGETS["torchtitan"].capabilities)
    with pytest.raises(ValueError, match="dtype: the trainer of the limits has bfloat16 and float32, got float16"):
        tw.problem(problem.cluster, training, limits=limits)
    with pytest.raises(ValueError, match=r"none\.json: cannot be read: No such file"):
        tw.read(tmp_path / "none.json", tw.Plan)


def test_paths_plain_data_and_names_of_presets_stand_for_nouns(problem: tw.Problem) -> None:
    cluster, model = EXAMPLES / "mixed-cluster.yaml", EXAMPLES / "model.yaml"
    data = yaml.safe_load(model.read_text(encoding="utf-8"))
    assert tw.problem(str(cluster), data) == problem
    accelerate = tw.problem(cluster, model, runtime="accelerate")
    assert accelerate.runtime.trainer == "accelerate"
    (best,) = tw.find_plans(accelerate, "amp")
    assert is_expressible(best.plan, TARGETS["accelerate"].capabilities)
    assert tw.estimate("pp2 mb1", accelerate).iteration_seconds > 0  # a given plan need not be one of the trainer's
    plan = tw.plan_in_words("pp2 mb1", problem)
    by_words, by_data = tw.estimate("pp2 mb1", problem), tw.estimate(documents.dump(plan), problem)
    assert by_words == by_data == tw.estimate(plan, problem)
    with pytest.raises(
        ValueError, match=r"runtime: no preset and no file 'megaton'; give a file, or one of .*megatron"
    ):
        tw.problem(cluster, model, runtime="megaton")
    with pytest.raises(ValueError, match="training: "):
        tw.problem(cluster, {"global_batch_size": 4})


def test_clusters_are_made_of_machines_as_on_the_command_line() -> None:
    given = ["p3.8xlarge=1", "lab=2x4xT4/pcie"]
    shown = CliRunner().invoke(app, ["cluster", *given, "--network", "10Gbit"]).stdout
    assert tw.cluster_of(*given, network="10Gbit") == documents.loads(shown, tw.Cluster)
    with pytest.raises(ValueError, match="expected MACHINE=COUNT"):
        tw.cluster_of("p3.8xlarge")


def test_library_explains_and_exports_as_the_command_line_does(problem: tw.Problem) -> None:
    words = "pp2 dp2 tp1 mb1"
    files = ["--cluster", str(EXAMPLES / "mixed-cluster.yaml"), "--model", str(EXAMPLES / "model.yaml")]
    explained = CliRunner().invoke(app, ["explain", *files, "--plan", words, "--output=json"])
    assert [*tw.explain(words, problem)] == json.loads(explained.stdout)["sentences"]
    assert any("more than pp1 dp4 tp1 mb1" in sentence for sentence in tw.explain(words, problem, against="pp1 dp4"))
    exported = CliRunner().invoke(
        app, ["export", words, "--to", "megatron", *files, "--runtime", "trainwright", "--output=json"]
    )
    written, made = json.loads(exported.stdout)["files"], tw.export(words, "megatron", problem)
    assert {name: commands(text) for name, text in made.items()} == {n: commands(text) for n, text in written.items()}
    assert "Nothing of the plan is lost." in made["launch.sh"]
    with pytest.raises(ValueError, match=r"to must be one of megatron, .*, got 'megaton'"):
        tw.export(words, "megaton", problem)


def commands(script: str) -> list[str]:
    """Return a script without its comments, which name where the plan is from."""
    return [line for line in script.splitlines() if not line.startswith("#")]


def test_values_print_in_one_line(problem: tw.Problem) -> None:
    answer = tw.ask(problem, "amp")
    (size,) = tw.size(EXAMPLES / "model.yaml", ["T4"])
    shown = [
        answer,
        answer.best,
        answer.best.plan,
        answer.best.estimate,
        size,
        problem,
        problem.cluster,
        problem.profiles,
    ]
    assert all(len(repr(value)) < 200 and "\n" not in repr(value) for value in shown)
    assert [repr(value).split()[0] for value in shown] == [f"<{type(value).__name__}" for value in shown]


def test_calibrated_problem_predicts_the_trial(problem: tw.Problem) -> None:
    plan = tw.plan_in_words("pp2 mb1", problem)
    seconds = tw.estimate(plan, problem).iteration_seconds
    fitted = tw.calibrate(tw.Trials((tw.Trial(plan, 1.2 * seconds),)), problem)
    training = tw.read(EXAMPLES / "model.yaml", tw.Training)
    again = tw.estimate(plan, tw.problem(problem.cluster, training, runtime=fitted.runtime)).iteration_seconds
    assert abs(again / seconds - 1.2) < abs(1 - 1.2)


def test_refusals_are_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "cluster.yaml"
    broken.write_text("nodes: 3")
    with pytest.raises(ValueError, match=r"cluster\.yaml"):
        tw.read(broken, tw.Cluster)
