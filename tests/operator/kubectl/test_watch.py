"""`trainwright watch`: what it prints of a plan, how it ends, and a sentence where there is nothing to watch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright_operator.kubectl import watch

Cluster = Callable[..., Path]


def plan_with(conditions: dict[str, tuple[str, str]], **status: Any) -> dict[str, Any]:
    listed = [
        {"type": kind, "status": value, "message": message, "reason": "Some"}
        for kind, (value, message) in conditions.items()
    ]
    return {"metadata": {"name": "tiny"}, "status": {"conditions": listed, **status}}


TRIAL = {"name": "candidate-1", "summary": "pp2", "state": "Succeeded", "predictedSeconds": 0.5, "measuredSeconds": 0.4}
UNDER_WAY = plan_with(
    {"Accepted": ("True", "with [red]all[/red] fields")}, progress={"what": "layers", "done": 1, "total": 4}
)
WON = plan_with(
    {"Accepted": ("True", "it is"), "Succeeded": ("True", "candidate-1 is the fastest")},
    trials=[TRIAL],
    winner={"trial": "candidate-1", "summary": "pp2", "measuredSeconds": 0.4, "speedupOverBaseline": 1.5},
)
FAILED = plan_with({"Succeeded": ("False", "no plan fits into memory")})


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.01)


def test_phases_and_trials_are_printed_once_and_a_winner_ends_with_0(cluster: Cluster) -> None:
    folder = cluster(UNDER_WAY, UNDER_WAY, WON)
    result = CliRunner().invoke(app, ["watch", "tiny", "--namespace=team", "--context=lab"])
    assert result.exit_code == 0, result.output
    assert result.output.count("accept the plan: with [red]all[/red] fields") == 1
    assert result.output.count("layers 1/4") == 1
    assert "answer: candidate-1 is the fastest" in result.output
    assert "1.50 × the best measured plan of Megatron's heuristic" in result.output
    calls = (folder / "calls").read_text().splitlines()
    assert len(calls) == 3
    assert set(calls) == {"--context lab get trainingplans.trainwright.dev tiny --namespace team --output json"}


def test_a_plan_without_a_winner_ends_with_1_and_its_reason(cluster: Cluster) -> None:
    cluster(FAILED)
    result = CliRunner().invoke(app, ["watch", "tiny"])
    assert result.exit_code == 1
    assert "no winner: Some: no plan fits into memory" in result.output


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ('Error from server (NotFound): trainingplans.trainwright.dev "tiny" not found', "there is no plan tiny"),
        ('Error from server (Forbidden): trainingplans "tiny" is forbidden: User "jo" cannot get', "you may not read"),
        ('error: the server doesn\'t have a resource type "trainingplans"', "the operator is not installed there"),
        ('error: context "lab" does not exist', 'context "lab" does not exist'),
    ],
)
def test_a_plan_that_cannot_be_read_is_refused_in_a_sentence(cluster: Cluster, error: str, said: str) -> None:
    cluster(error=error)
    result = CliRunner().invoke(app, ["watch", "tiny"])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_without_kubectl_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(app, ["watch", "tiny"])
    assert result.exit_code == 2
    assert "kubectl is not on PATH" in result.output
