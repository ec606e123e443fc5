"""Pictures of the documentation, drawn by the functions of the page from committed plans and measurements."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

import trainwright
from trainwright.accelerators import cluster_of
from trainwright.answer import HEURISTIC, Answer, Question, answer_of_plan, with_baselines
from trainwright.plan import Plan
from trainwright.report.breakdown import Difference
from trainwright.report.iteration_chart import stage_tracks
from trainwright.report.page.bar_figures import difference_figure
from trainwright.report.page.cluster_figures import placement_figure
from trainwright.report.page.markup import element, figure, legend, picture
from trainwright.report.page.timeline_figure import timeline_figure
from trainwright.report.worth import heuristic_difference
from trainwright.training import Training

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
EXAMPLE_PLAN = FOLDER / "example-plan.json"
"""Plan that `trainwright plan` finds for the README's example."""
MODEL = ROOT / "deploy" / "examples" / "planner" / "gpt2-medium.yaml"
MACHINES: Final = {"p3.8xlarge": 3, "g4dn.12xlarge": 1}
TRIALS = ROOT / "benchmarks" / "results" / "trials.csv"
MAX_LATE_SHARE: Final = 0.01
"""Share of computations whose emulation came too late above which a trial does not count."""
WIDTH: Final = 900


@cache
def _example() -> Answer:
    problem = trainwright.problem(cluster_of(MACHINES), trainwright.read(MODEL, Training))
    answer = answer_of_plan(problem, trainwright.read(EXAMPLE_PLAN, Plan))
    return with_baselines(Question((problem,), HEURISTIC, baselines=1), answer)


def _difference() -> Difference:
    answer = _example()
    difference = heuristic_difference(answer.best, answer.baselines, answer.problem)
    assert difference is not None
    return difference


def timeline() -> str:
    """Draw the placement and the predicted iteration of the example's plan."""
    answer = _example()
    plan, context = answer.best.plan, answer.problem.cost_context
    drawn = timeline_figure(stage_tracks(plan, context), answer.best.estimate.iteration_seconds)
    return picture(placement_figure(plan, answer.problem.cluster), drawn, width=WIDTH, height=500)


def difference() -> str:
    """Draw why the example's plan is faster than the heuristic's."""
    return picture(difference_figure(_difference()), width=WIDTH, height=370)


def accuracy() -> str:
    """Draw the measured against the predicted iteration of every plan of the last trials."""
    with TRIALS.open(encoding="utf-8", newline="") as file:
        counted = [row for row in csv.DictReader(file) if float(row["late_share"]) <= MAX_LATE_SHARE]
    pairs = [(float(row["predicted_seconds"]), float(row["measured_seconds"])) for row in counted]
    most = max(max(pair) for pair in pairs) * 1.05
    size, margin = 420.0, 46.0

    def at(value: float) -> float:
        return round(value / most * size, 1)

    dots = [element("circle", class_="mark", cx=margin + at(x), cy=size - at(y), r=4, opacity=0.7) for x, y in pairs]
    corner = {"x1": margin, "y1": size, "x2": margin + size, "y2": 0}
    ticks = [
        shape
        for value in range(int(most) + 1)
        for shape in (
            element("text", str(value), x=margin + at(value), y=size + 18, text_anchor="middle"),
            element("text", str(value), x=margin - 8, y=size - at(value) + 4, text_anchor="end"),
        )
    ]
    labels = [
        element("text", "predicted seconds of an iteration", x=margin + size / 2, y=size + 38, text_anchor="middle"),
        element("text", "measured", x=margin + 8, y=14),
    ]
    axes = [
        element("line", class_="limit", x1=margin, y1=size, x2=margin + size, y2=size),
        element("line", class_="limit", x1=margin, y1=size, x2=margin, y2=0),
        element("line", class_="band", **corner),
    ]
    drawing = element(
        "svg",
        axes,
        dots,
        ticks,
        labels,
        viewBox=f"0 0 {size + 2 * margin:g} {size + margin:g}",
        role="img",
        aria_label="Accuracy",
    )
    errors = [abs(predicted - measured) / measured for predicted, measured in pairs]
    caption = f"{len(pairs)} plans, {sum(errors) / len(errors):.1%} off on average; on the line they would be exact."
    return picture(figure(caption, legend(("mark", "a plan")), drawing), width=560, height=560)


PICTURES: Final[dict[str, Callable[[], str]]] = {
    "timeline.svg": timeline,
    "difference.svg": difference,
    "accuracy.svg": accuracy,
}
"""Pictures by file name."""
