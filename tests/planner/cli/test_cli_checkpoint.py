"""`trainwright checkpoint` where the worker or torch is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright.cli import app

runner = CliRunner()


@pytest.mark.parametrize("missing", ["torch", "trainwright_worker"])
def test_checkpoint_says_what_is_missing_and_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for module in [name for name in sys.modules if name.split(".", 1)[0] == "trainwright_worker"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)
    result = runner.invoke(app, ["checkpoint", "convert", str(tmp_path / "one"), str(tmp_path / "other")])
    assert result.exit_code == 2
    assert result.stderr == (
        f"trainwright: the package {missing} is not installed here; install `trainwright[worker]`, or run this command "
        "in the worker's image\n"
    )


def test_checkpoint_alone_shows_its_help() -> None:
    result = runner.invoke(app, ["checkpoint"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "convert" in result.stdout
