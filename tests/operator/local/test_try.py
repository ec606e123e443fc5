"""`make try` from a checkout without an environment: what it installs, once, and what it starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PYTHON = """#!/bin/bash
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-c "*) exec {python} "$@" ;;
  "-m pip") echo "pip ${{*:3}}" >> "$LOG"; [[ "$*" != *"$UNREACHABLE"* ]] ;;
  *) echo "$*" >> "$LOG" ;;
esac
"""
TUNE = "-m trainwright tune deploy/examples/tiny.yaml"
INDEX = "--index-url https://download.pytorch.org/whl/cpu"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with what the script reads, and a Python that only notes what it is asked for."""
    (tmp_path / "deploy" / "development").mkdir(parents=True)
    shutil.copy(ROOT / "deploy" / "development" / "try.sh", tmp_path / "deploy" / "development")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "python").write_text(PYTHON.format(python=sys.executable))
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def run(checkout: Path, unreachable: str) -> list[str]:
    """Return what the script asked of Python on a machine without GPUs; pip fails for words that hold `unreachable`."""
    log = checkout / "log"
    log.write_text("")
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(checkout / "python"), "LOG": str(log)}
    subprocess.run(
        [checkout / "deploy" / "development" / "try.sh"], env={**environment, "UNREACHABLE": unreachable}, check=True
    )
    return log.read_text().splitlines()


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="the wheel with CUDA is for machines with GPUs")
def test_tested_torch_is_installed_once_then_the_plan_is_tuned(checkout: Path) -> None:
    first, second, *rest = run(checkout, "nothing of this kind")
    assert first == f"pip install --quiet torch>=2.8,<2.14 {INDEX}"
    assert (second, rest) == ("pip install --quiet .[worker]", [TUNE])
    assert run(checkout, "") == [TUNE]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="the wheel with CUDA is for machines with GPUs")
def test_other_index_is_asked_where_that_of_cpu_wheels_is_out_of_reach(checkout: Path) -> None:
    requirement = "pip install --quiet torch>=2.8,<2.14"
    assert run(checkout, "download.pytorch.org") == [
        f"{requirement} {INDEX}", requirement, "pip install --quiet .[worker]", TUNE,
    ]  # fmt: skip
