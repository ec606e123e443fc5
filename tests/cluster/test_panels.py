"""Panels of both dashboards, alerts and the page's queries show the right numbers in a real Prometheus at two scrape intervals."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pytest
from panel_numbers import (
    COUNTS,
    HAS_DATA,
    OF_THE_CLOCK,
    ROUNDING,
    SHARES,
    answers_of,
    bounds,
    extrapolated,
    right_numbers,
    within,
)
from panel_story import JOBS, Story, hurried_rules, run_story
from prometheus import Query, page_queries, panel_queries
from soak_cluster import NAMESPACE


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with run_story(tmp_path_factory.mktemp("story")) as story:
        yield story


@pytest.mark.parametrize("job", JOBS)
def test_panels_show_what_the_statuses_say(story: Story, job: str) -> None:
    queries = panel_queries("1h", release=job)
    expected = right_numbers(story)
    between = bounds(story)
    waits = ("Waits", "A")
    assert queries.keys() == expected.keys() | between.keys() | HAS_DATA | {waits}
    wrong = {}
    for query, expression in queries.items():
        title, _ = query
        if query == waits:  # a status tells those of all reasons together
            hours = sum(one.get("waiting", {}).get("earlierSeconds", 0) for one in story.statuses.values()) / 3600
            (shown_hours,) = story.prometheus.values(f"sum({expression})", at=story.ended).values()
            if shown_hours != pytest.approx(hours, rel=extrapolated(JOBS[job], story), abs=1e-6):
                wrong[query] = f"shown {shown_hours}, right {hours}"
            continue
        if query in between:
            labels, least, most = between[query]
            shown = story.prometheus.values(expression, *labels, at=story.ended)
            if shown.keys() != most.keys() or not all(least[key] <= shown[key] <= most[key] for key in most):
                wrong[query] = f"shown {shown}, at least {least}, at most {most}"
            continue
        if query in HAS_DATA:
            if not story.prometheus.query(expression, at=story.ended):
                wrong[query] = "no data"
            continue
        labels, values = expected[query]
        shown = story.prometheus.values(expression, *labels, at=story.ended)
        share = extrapolated(JOBS[job], story) if title in COUNTS | SHARES else ROUNDING
        tolerance = 2.0 if title in OF_THE_CLOCK else 1e-6
        near = pytest.approx(values, rel=share, abs=tolerance)
        if shown != near:
            wrong[query] = f"shown {shown}, right {dict(values)}"
    assert not wrong, "\n".join(f"{query}: {what}" for query, what in wrong.items())


ANSWERS: Mapping[str, tuple[str, Query]] = {
    'bucket{kind="time",le="1.2"}': ("accelerator", ("Predicted within 20 %, by accelerator", "A")),
    "0.5, sum by (le, accelerator)": ("accelerator", ("Predicted over measured time, by accelerator", "A")),
    'reason="OutOfMemory"': ("", ("Out of memory", "A")),
    "avg(max by (plan_namespace, name) (trainwright_plan_regret_ratio))": ("", ("Regret of the first prediction", "A")),
    "group_left (family, accelerators": ("plan_namespace,name", ("Winners", "B")),
    "0.5, sum by (le, planner)": ("planner", ("Speed-up, by planner", "A")),
    "trainwright_device_seconds_total": ("purpose", ("Device-hours, by purpose", "A")),
    "trainwright_plan_payback_iterations": ("plan_namespace,name", ("Winners", "K")),
    "trainwright_plans_finished_total": ("result,reason", ("Plans that finished", "A")),
    "trainwright_plan_waiting_since": ("plan_namespace,name,reason", ("Waits of plans", "A")),
    "trainwright_plan_model_flop_utilisation_ratio": ("plan_namespace,name", ("Winners", "H")),
    "trainwright_profile_timestamp_seconds": ("accelerator", ("Age of profiles", "A")),
}
"""Part of each query of the page whose numbers are compared: its labels, and the right numbers."""


def of_job(expression: str, job: str) -> str:
    """Return the expression on the series of one scrape job."""
    selected = re.sub(r"(trainwright_\w+)(?![\w{])", r"\1{}", expression)
    return re.sub(r"(trainwright_\w+)\{", rf'\1{{job="{job}",', selected).replace(",}", "}")


@pytest.mark.parametrize("job", JOBS)
def test_questions_of_the_page_have_the_right_answers(story: Story, job: str) -> None:
    right, queries = answers_of(story), page_queries()
    for expression in queries:
        if "trainwright_node_speed_ratio" in expression:
            continue  # of real devices
        assert story.prometheus.query(of_job(expression, job), at=story.ended), expression
    for part, (labels, query) in ANSWERS.items():
        (expression,) = (one for one in queries if part in one)
        expected = right[query]
        shown = story.prometheus.values(of_job(expression, job), *filter(None, labels.split(",")), at=story.ended)
        is_of_counters = "increase" in expression
        share = extrapolated(JOBS[job], story) if is_of_counters else ROUNDING
        tolerance = 2.0 if "time()" in expression else 1e-6
        assert shown == pytest.approx(expected, rel=share, abs=tolerance), expression


def test_alerts_fire_for_what_happened_and_for_nothing_else(story: Story) -> None:
    server, span = story.prometheus, f"{round(story.ended - story.started)}s"
    fired = server.values(f'max_over_time(ALERTS{{alertstate="firing"}}[{span}])', "alertname", at=story.ended)
    trials = [
        trial for one in story.statuses.values() for trial in one.get("trials", []) if trial["state"] == "Succeeded"
    ]
    good = within([trial["predictedSeconds"] / trial["measuredSeconds"] for trial in trials], 0.8, 1.2)[""]
    # All plans take longer than the hurried thresholds, and nobody held the lease for a while after the kill.
    expected = {"TrainwrightPlanLacks", "TrainwrightNoOperator", "TrainwrightPlanStuck"}
    expected |= {"TrainwrightPredictionsAreOff"} if good < 0.5 and len(trials) >= 10 else set()
    # Plans may choose the same nodes at once; a wait for each other is seen until the next scrape, beyond the hurried threshold.
    waits = [one.get("waiting", {}).get("earlierSeconds", 0) for one in story.statuses.values()]
    possible = {"TrainwrightPlanWaitsForCapacity"} if any(waits) else set()
    assert expected <= fired.keys() <= expected | possible
    alerts = {rule["alert"]: rule["expr"] for rule in hurried_rules()["groups"][0]["rules"]}
    lacks = server.values(alerts["TrainwrightPlanLacks"], "plan_namespace", "reason", at=story.ended)
    assert lacks == {f"{NAMESPACE},{story.existing['lacking']['waiting']['reason']}": 1}
    off = server.values(alerts["TrainwrightPredictionsAreOff"], "job", "accelerator", at=story.ended)
    assert off == pytest.approx({f"{name},emulated-v100": 1 - good for name in JOBS}, rel=0.03)
    assert not server.query(alerts["TrainwrightNoOperator"], at=story.ended)
