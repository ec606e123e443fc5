"""Command `trainwright bench papers`."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from trainwright.cli import app, bench
from trainwright_papers.amp_settings import EXPERIMENTS


def test_command_prints_tables_that_fit_sixty_columns():
    result = CliRunner().invoke(app, ["bench", "papers", "--table", "amp-trials"], env={"COLUMNS": "60"})
    assert result.exit_code == 0, result.output
    assert "1.32" in result.stdout
    assert "Spearman" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 60


def test_command_prints_every_measured_plan_as_json():
    result = CliRunner().invoke(
        app, ["bench", "papers", "--table", "amp-trials", "--table", "amp-3", "--output", "json"]
    )
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    trials, methods = answer["tables"]
    assert answer["origin"] == "estimated"
    assert len(trials["records"]) == 27
    assert all(record["predicted_seconds"] > 0 for record in trials["records"])
    assert [record["method"] for record in methods["records"]] == ["Megatron", "AMP", "SA"]
    assert set(trials["agreement"]) == set(EXPERIMENTS)


def test_command_refuses_an_unknown_table_in_one_sentence():
    result = CliRunner().invoke(app, ["bench", "papers", "--table", "amp-12"])
    assert result.exit_code == 2
    assert "amp-12" in result.stderr
    assert "amp-trials" in result.stderr
    assert not result.stdout


def test_command_says_what_to_install_when_the_package_is_missing(monkeypatch):
    monkeypatch.setattr(bench, "PACKAGE", "no_such_package")
    result = CliRunner().invoke(app, ["bench", "papers"])
    assert result.exit_code == 2
    assert "no_such_package is not installed" in result.stderr
    assert "make venv" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not result.stdout


def test_completion_is_empty_when_the_package_is_missing(monkeypatch):
    assert bench.complete_table_name("amp-t") == ["amp-trials"]
    monkeypatch.setattr(bench, "PACKAGE", "no_such_package")
    assert bench.complete_table_name("amp-t") == []
