"""`trainwright report --cluster`: the questions on plan quality, answered by the figures of the metrics."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from answered_plans import BASELINE, FIRST, SECOND, WAITING, resource, status_of, trial
from flow_world import START
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.kubectl.cluster_page import MAX_PLANS, page_of

NOW = START + timedelta(hours=5)
Cluster = Callable[..., Path]


def answered(**fields: Any) -> TrainingPlanStatus:
    spent = [{"purpose": "Trials", "succeeded": 7200.0, "failed": 3600.0}]
    return status_of(FIRST, SECOND, BASELINE, deviceSeconds=spent, profilesMeasuredAt=START, **fields)


class Reader(HTMLParser):
    """Rows of a page's tables by their label, as texts of the cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[str] = []
        self._rows: list[list[str]] = []
        self._is_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        if given.get("role") == "region":
            self._rows = self.tables.setdefault(str(given["aria-label"]), [])
        if tag == "tr":
            self._rows.append([])
        self._is_cell |= tag in {"td", "th"}
        if tag in {"td", "th"}:
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_cell &= tag not in {"td", "th"}

    def handle_data(self, data: str) -> None:
        if self._is_cell:
            self._rows[-1][-1] += data.strip()


def test_questions_are_answered_by_the_figures_of_the_metrics() -> None:
    failed = status_of(FIRST, succeeded="False")
    page = page_of([resource("good", answered()), resource("bad", failed), resource("slow", WAITING)], NOW, None)
    tables = Reader(page).tables
    assert "1 have their answer, 1 failed, 1 are under way, of which 1 wait, 0 are suspended." in page
    assert tables["Waiting plans"][1] == ["team/slow", "", "6 h", "WaitingForCapacity", "Pending"]
    ratios = [1.0 / 1.5, 1.1, 1.0, 1.0 / 1.5]
    held = f"{sum(abs(ratio - 1) <= 0.2 for ratio in ratios) / 4:.0%}"
    assert tables["Predictions"][1][2:] == ["4", held, "0.83", "0"]
    assert tables["Ranks of winners"][1:] == [["rank 2", "", "1"]]
    assert "The best prediction was 50.0% slower than the winner on average" in page
    assert tables["Device hours"][1] == ["team", "0", "0", "3", "1"]
    assert tables["Payback"][1][0] == "team/good"
    assert tables["Age of profiles"][1][:2] == ["Tesla-T4", "5 h"]
    row = next(row for row in tables["All plans"] if row[0] == "team/good")
    assert row[3:6] == ["1 s", "1.1 s", "2.00 ×"]
    assert "needs Prometheus" in page


def test_out_of_memory_counts_beside_predictions() -> None:
    oom = trial("candidate-3", 3, 1.0, None, state="Failed", reason="OutOfMemory", measuredSeconds=None)
    page = page_of([resource("good", status_of(FIRST, SECOND, oom))], NOW, "team")
    assert Reader(page).tables["Predictions"][1][-1] == "1"


@pytest.mark.parametrize(("count", "is_by_node"), [(64, True), (65, False)])
def test_more_than_64_nodes_are_shown_by_type(count: int, is_by_node: bool) -> None:
    nodes = [
        {"name": f"n{number}", "accelerator": "Tesla-T4", "devices": 1, "relativeSeconds": 1.5 if number == 0 else 1.0}
        for number in range(count)
    ]
    cluster = {
        "devices": count,
        "nodes": nodes,
        "accelerators": [{"name": "Tesla-T4", "devices": count, "memoryBytes": 1}],
    }
    tables = Reader(page_of([resource("good", answered(cluster=cluster))], NOW, None)).tables
    assert ("Speeds of nodes" in tables) is is_by_node
    if not is_by_node:
        assert tables["Speeds by type of device"][1] == ["Tesla-T4", "65", "1", "1.00", "1.50"]


def test_a_thousand_plans_stay_below_200_kb_and_say_what_is_left_out() -> None:
    plans = [resource(f"plan-{number:04}", answered(), f"team-{number % 10}") for number in range(1000)]
    page = page_of(plans, NOW, None)
    assert len(page.encode()) < 200_000
    assert f"{1000 - MAX_PLANS} of 1000 plans are left out" in page


def test_names_and_reasons_are_escaped_and_an_empty_cluster_is_a_page() -> None:
    evil = "<script>alert(1)</script>"
    excluded = [{"name": "n1", "code": None, "reason": evil}]
    accelerators = [{"name": evil, "devices": 1, "memoryBytes": 1}]
    nodes = [{"name": evil, "accelerator": evil, "devices": 1, "relativeSeconds": 1.2}]
    cluster = {"devices": 1, "excludedNodes": excluded, "accelerators": accelerators, "nodes": nodes}
    body = answered(cluster=cluster, waiting={"reason": evil, "since": START.isoformat()}).dump()
    page = page_of([resource(evil, body)], NOW, evil)
    assert Reader(page).tags.count("script") == 1
    assert "&lt;script&gt;alert" in page
    assert "default-src 'none'" in page
    assert "There are none." in page_of([], NOW, None)


def test_the_command_lists_what_one_may_read(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls = cluster({"items": [resource("good", answered())]}) / "calls"
    assert CliRunner().invoke(app, ["report", "--cluster"]).exit_code == 0
    assert calls.read_text().split() == ["get", "trainingplans.trainwright.dev", "--all-namespaces", "--output", "json"]
    assert "team/good" in (tmp_path / "plans.html").read_text(encoding="utf-8")
    assert CliRunner().invoke(app, ["report", "--cluster", "-n", "team", "--output=mine.html"]).exit_code == 0
    assert "--namespace team" in calls.read_text()
    cluster(error='Error from server (Forbidden): trainingplans is forbidden: User "jo" cannot list resource')
    refused = CliRunner().invoke(app, ["report", "--cluster"])
    assert refused.exit_code == 2
    assert "name one that you may read with --namespace" in " ".join(refused.output.split())
    assert CliRunner().invoke(app, ["report"]).exit_code == 2
    assert CliRunner().invoke(app, ["report", "tiny", "--cluster"]).exit_code == 2
