"""Surface of `import trainwright`: what the page names, typed, loaded on first use, and equal to the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trainwright as tw
from trainwright.cli import app
from trainwright.exports import TARGETS
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
