"""Answers of the library in a notebook: drawn as on the page, self-contained, confined to themselves."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import trainwright as tw
from trainwright.cluster import Device
from trainwright.plan import LayerRun, Pipeline, Stage
from trainwright.search import Problem
from trainwright.strategy import Strategy

EXAMPLES = Path(__file__).resolve().parents[3] / "deploy" / "examples" / "planner"
WORDS = "pp2 dp2 tp1 mb1 zero1"


@pytest.fixture(scope="module")
def problem() -> Problem:
    return tw.problem(
        tw.read(EXAMPLES / "mixed-cluster.yaml", tw.Cluster), tw.read(EXAMPLES / "model.yaml", tw.Training)
    )


@pytest.fixture(scope="module")
def answer(problem: Problem) -> tw.Answer:
    return tw.ask(problem, "amp", top=2)


class Tags(HTMLParser):
    """Parser that fails where tags are not nested, and notes what they load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.sources += [name for name, _ in attrs if name in {"src", "href", "srcset", "onload", "onclick"}]
        assert tag not in {"script", "link", "iframe", "img", "main", "body"}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(html: str) -> str:
    """Return the text without style, of HTML that is whole, small, loads nothing, and styles nothing but itself."""
    tags = Tags()
    tags.feed(html)
    assert (tags.open, tags.sources) == ([], [])
    assert len(html) < 60_000
    style, text = re.fullmatch(r'(?s)<div class="trainwright-answer"><style>(.*?)</style>(.*)</div>', html).groups()
    assert style.startswith(".trainwright-answer {")
    assert style.count("{") == style.count("}")
    assert not re.search(r"url\(|@import|:root|\bbody\b|\bmain \{", style)
    return text


def test_answer_shows_the_best_plan_the_candidates_and_why(answer: tw.Answer) -> None:
    text = checked(answer._repr_html_())
    assert f"An iteration of 32 rows takes {1000 * answer.best.estimate.iteration_seconds:.4g} ms" in text
    assert all(candidate.plan.summary() in text for candidate in answer.candidates)
    assert "the heuristic's plan on the T4 alone" in text
    assert "stage 1" in text


def test_estimate_candidate_and_plan_show_what_they_hold(problem: Problem, answer: tw.Answer) -> None:
    plan = tw.plan_in_words(WORDS, problem)
    estimate = tw.estimate(plan, problem)
    assert f"takes {1000 * estimate.iteration_seconds:.4g} ms, predicted" in checked(estimate._repr_html_())
    shown = checked(plan._repr_html_())
    assert f"{plan.summary()} zero1" in shown
    assert "2 on p3.8xlarge-1" in shown
    of_candidate = checked(answer.best._repr_html_())
    assert answer.best.plan.summary() in of_candidate
    assert "computation" in of_candidate


def test_plan_that_does_not_fit_says_so(problem: Problem) -> None:
    tight = tw.problem(problem.cluster, tw.read(EXAMPLES / "gpt2-medium.yaml", tw.Training))
    estimate = tw.estimate(tw.plan_in_words("pp1 dp1 tp1 mb32", tight), tight)
    assert not estimate.feasible
    assert f"It does not fit into memory: {estimate.reason}" in checked(estimate._repr_html_()).replace("&amp;", "&")


def test_names_are_escaped_and_long_plans_cut() -> None:
    devices = tuple(Device("<script>alert(1)</script>", slot) for slot in range(50))
    stages = tuple(
        Stage((device,), (LayerRun(number, 1, Strategy(1, 1), (1,)),)) for number, device in enumerate(devices)
    )
    text = checked(tw.Plan(50, 1, (Pipeline(1, 1, stages),))._repr_html_())
    assert "1 on &lt;script&gt;alert(1)" in text
    assert "10 of 50 stages are left out." in text


def test_drawings_load_only_where_a_notebook_asks() -> None:
    program = (
        "import sys, trainwright as tw; tw.Plan; tw.Answer;"
        "print([name for name in sys.modules if name.startswith('trainwright.report')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
