"""Difference of two plans by part: the parts add up, and the sentence names what the plans do differently."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from random_problems import drawn_plan, drawn_problem
from typer.testing import CliRunner, Result

from trainwright import documents
from trainwright.accelerators import cluster_of
from trainwright.cli import app
from trainwright.report.breakdown import Difference, why
from trainwright.report.page.bar_figures import difference_figure
from trainwright.report.page.markup import markup
from trainwright.report.units import SAME
from trainwright.search.candidates import candidate_of


@given(st.randoms(use_true_random=False))
def test_parts_add_up_to_the_difference(pick: random.Random) -> None:
    problem = drawn_problem(pick)
    plans = [drawn_plan(problem, pick) for _ in range(2)]
    assume(None not in plans)
    own, other = (candidate_of(problem, plan) for plan in plans if plan is not None)
    there, back = Difference(own, other, "the other plan"), Difference(other, own, "the other plan")
    rounding = 1e-9 * max(candidate.estimate.iteration_seconds for candidate in (own, other))
    whole = other.estimate.iteration_seconds - own.estimate.iteration_seconds
    assert sum(there.saved_seconds.values()) == pytest.approx(whole, abs=rounding)
    assert back.saved_seconds == {part: -saved for part, saved in there.saved_seconds.items()}
    left_out = set(there.saved_seconds) - set(there.parts)
    assert not any(there.saved_seconds[part] for part in left_out)
    (sentence,) = why(there, problem).sentences
    is_same = abs(whole) < SAME * other.estimate.iteration_seconds
    assert ("as long as" if is_same else "less than" if whole > 0 else "more than") in sentence


def test_a_plan_takes_as_long_as_itself() -> None:
    pick = random.Random(1)
    problem = drawn_problem(pick)
    plan = next(plan for plan in (drawn_plan(problem, pick) for _ in range(50)) if plan is not None)
    own = candidate_of(problem, plan)
    remark = why(Difference(own, own, "the other plan"), problem)
    assert remark.sentences == ("This plan takes as long as the other plan.",)
    assert not any(remark.fields["difference"]["saved_seconds_by_part"].values())


def test_rounding_is_no_difference() -> None:
    pick = random.Random(1)
    problem = drawn_problem(pick)
    plan = next(plan for plan in (drawn_plan(problem, pick) for _ in range(50)) if plan is not None)
    own = candidate_of(problem, plan)
    parts = own.estimate.breakdown
    rounded = replace(parts, compute_seconds=math.nextafter(parts.compute_seconds, math.inf))
    difference = Difference(own, replace(own, estimate=replace(own.estimate, breakdown=rounded)), "the other plan")
    assert not any(difference.saved_seconds.values())
    drawn = markup(difference_figure(difference))
    assert ">0 s<" in drawn
    assert "-0 s" not in drawn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """GPT-2 medium, whose embedding is tied, on two machines of V100 over a network of 10 Gbit/s."""
    (tmp_path / "model.yaml").write_text(
        "gpt: {layers: 24, hidden_size: 1024, heads: 16, sequence_length: 1024, vocabulary_size: 52256}\n"
        "global_batch_size: 32\ndtype: float16\n"
    )
    (tmp_path / "cluster.json").write_text(documents.dumps(cluster_of({"p3.8xlarge": 2})))
    return tmp_path


def call(folder: Path, *words: str) -> Result:
    given = [f"--cluster={folder / 'cluster.json'}", f"--model={folder / 'model.yaml'}"]
    return CliRunner().invoke(app, [*words, *given])


def test_explain_says_what_the_plans_do_differently(folder: Path) -> None:
    answer = json.loads(
        call(folder, "explain", "--plan=pp1 dp8 zero1 mb1", "--against=pp2 dp4 mb1", "--output=json").stdout
    )
    difference = answer["difference"]
    assert difference["against"].startswith("pp2 dp4 mb1 (")
    saved = difference["saved_seconds_by_part"]
    assert saved["bubble_seconds"] > 0
    assert saved["gradient_sync_seconds"] < 0
    sentence = next(line for line in answer["sentences"] if line.startswith("This plan takes"))
    assert "for bubbles (stages: 1 in place of 2)" in sentence
    assert "for gradient reductions (replicas: 8 in place of 4)" in sentence


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_answers_say_why_they_beat_the_heuristic(folder: Path, command: str) -> None:
    planners = ["megatron", "amp"] if command == "compare" else ["--planner=amp"]
    answer = json.loads(call(folder, command, *planners, "--output=json").stdout)
    seconds = answer["heuristic"]["seconds_on_all"]
    fastest = min(row["predicted_seconds"] for row in answer["planners" if command == "compare" else "candidates"])
    assert answer["difference"]["saved_seconds"] == pytest.approx(seconds - fastest)
    assert sum(answer["difference"]["saved_seconds_by_part"].values()) == pytest.approx(seconds - fastest)
    shown = call(folder, command, *planners).stdout
    assert "Difference to the heuristic's plan" in shown
    assert "than the heuristic's plan:" in " ".join(shown.split())


def test_explain_against_the_heuristic_and_refusals(folder: Path) -> None:
    shown = call(folder, "explain", "--plan=pp2 dp4 mb1", "--against=heuristic").stdout
    assert "Difference to the heuristic's plan" in shown
    refused = call(folder, "explain", "--plan=pp2 dp4 mb1", "--against=nothing.json")
    assert refused.exit_code == 2
    assert "nothing.json" in refused.output


def test_explain_says_that_the_trainer_supports_no_plan_of_the_heuristic(folder: Path) -> None:
    model = folder / "model.yaml"
    model.write_text(model.read_text().replace("hidden_size: 1024", "hidden_size: 2048"))
    limit = ("--planner=amp", "--expressible-by=accelerate")  # the heuristic needs stages, which Accelerate has not
    refused = call(folder, "explain", *limit, "--against=heuristic")
    assert refused.exit_code == 2
    assert "no plan of Megatron's heuristic fits into memory and is supported by the trainer" in refused.output
