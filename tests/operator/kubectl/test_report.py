"""`trainwright report`: the stored page as a file, and a sentence wherever there is none."""

from __future__ import annotations

import gzip
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainwright import documents
from trainwright.cli import app
from trainwright.cluster import Device
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy

Cluster = Callable[..., Path]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan_with(succeeded: str, **status: Any) -> dict[str, Any]:
    reached = {"type": "Succeeded", "status": succeeded, "reason": "Some", "message": "a message"}
    return {"metadata": {"name": "tiny"}, "status": {"conditions": [reached], **status}}


DRAWN = plan_with("True", report={"configMap": "tiny-report"})
PAGE = "<!doctype html>\n<p>größer</p>\n"
STORED = {"binaryData": {"report.html.gz": b64encode(gzip.compress(PAGE.encode())).decode()}}


def test_the_page_is_written_under_the_plans_name_or_as_asked(cluster: Cluster, folder: Path) -> None:
    calls = cluster(DRAWN, STORED) / "calls"
    result = CliRunner().invoke(app, ["report", "tiny", "--namespace=team", "--context=lab"])
    assert result.exit_code == 0, result.output
    assert (folder / "tiny.html").read_text(encoding="utf-8") == PAGE
    assert (
        calls.read_text().splitlines()[-1] == "--context lab get configmap tiny-report --namespace team --output json"
    )
    calls.unlink()
    assert CliRunner().invoke(app, ["report", "tiny", "--output=page.html"]).exit_code == 0
    assert (folder / "page.html").exists()
    again = CliRunner().invoke(app, ["report", "tiny", "--output=missing/page.html"])
    assert again.exit_code == 1


def test_a_directory_of_the_plans_name_is_not_taken_for_a_state(cluster: Cluster, folder: Path) -> None:
    cluster(DRAWN, STORED)
    (folder / "tiny").mkdir()
    assert CliRunner().invoke(app, ["report", "tiny"]).exit_code == 0
    assert (folder / "tiny.html").exists()


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (
            (plan_with("Unknown", phase="Profiling", progress={"text": "3/8 layers"}),),
            "no answer (Profiling, 3/8 layers)",
        ),
        (({"metadata": {"name": "tiny"}},), "no answer (Pending)"),
        ((plan_with("False"),), "it failed: Some: a message"),
        ((plan_with("True", report={"problem": "no ink"}),), "has its answer, but no page: no ink"),
        ((plan_with("True"),), "of a version that draws none"),
        ((DRAWN, {"binaryData": {"report.html.gz": "bm8="}}), "holds no page that can be read"),
        ((DRAWN, {"data": {}}), "holds no page that can be read"),
    ],
)
def test_a_plan_without_a_page_says_why(
    cluster: Cluster, folder: Path, answers: tuple[dict[str, Any], ...], said: str
) -> None:
    cluster(*answers)
    result = CliRunner().invoke(app, ["report", "tiny"])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert not (folder / "tiny.html").exists()


def test_a_state_directory_gives_the_page_beside_the_winner(folder: Path) -> None:
    state = folder / ".trainwright" / "tiny"
    (state / "winner").mkdir(parents=True)
    without = CliRunner().invoke(app, ["report", str(state)])
    assert without.exit_code == 2
    assert "no state directory" in without.output
    (state / "status.yaml").write_text("status: {}")
    assert "has no winner yet" in " ".join(CliRunner().invoke(app, ["report", str(state)]).output.split())
    (state / "winner" / "report.html").mkdir()
    unreadable = CliRunner().invoke(app, ["report", str(state)])
    assert unreadable.exit_code == 2
    assert "report.html: cannot be read: Is a directory" in " ".join(unreadable.output.split())
    (state / "winner" / "report.html").rmdir()
    (state / "winner" / "report.html").write_text(PAGE, encoding="utf-8")
    assert CliRunner().invoke(app, ["report", str(state)]).exit_code == 0
    assert (folder / "tiny.html").read_text(encoding="utf-8") == PAGE


def test_other_files_are_refused_with_what_to_do(folder: Path) -> None:
    run = LayerRun(0, 1, Strategy(1, 1), (1,))
    plan = Plan(1, 1, (Pipeline(1, 1, (Stage((Device("n1", 0),), (run,)),)),))
    (folder / "plan.json").write_text(documents.dumps(plan))
    refused = CliRunner().invoke(app, ["report", "plan.json"])
    assert refused.exit_code == 2
    assert "trainwright explain --plan plan.json" in " ".join(refused.output.split())
    (folder / "other.txt").write_text("{")
    assert "give a state directory" in " ".join(CliRunner().invoke(app, ["report", "other.txt"]).output.split())
    assert "there is no such file" in CliRunner().invoke(app, ["report", "missing/plan"]).output
