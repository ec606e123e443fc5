"""Commit subjects have the form `area: Imperative summary`."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "development" / "check_commits.py"
complaint = runpy.run_path(str(SCRIPT))["complaint"]


@pytest.mark.parametrize(
    "subject",
    [
        "documents: State kinds instead of class names",
        "search/auto: Remove phases that win nothing",
        "planner, operator: Move and merge modules",
        "cost: Process messages in order",
        "tests: Embed plans",
    ],
)
def test_subject_with_area_and_imperative_passes(subject: str) -> None:
    assert complaint(subject) is None


@pytest.mark.parametrize(
    ("subject", "what"),
    [
        ("Table of auto: all cases anew", "form"),
        ("cost: share terms", "form"),
        ("cost: Share terms.", "form"),
        ("cost: Shared terms of all searches", "imperative"),
        ("cost: Sharing terms of all searches", "imperative"),
        ("cost: Shares terms of all searches", "imperative"),
        (f"cost: Share {'x' * 70}", "72"),
    ],
)
def test_other_subject_is_refused_with_the_reason(subject: str, what: str) -> None:
    assert what in complaint(subject)


def git(folder: Path, *arguments: str) -> None:
    named = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *named, *arguments], cwd=folder, check=True, capture_output=True)


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT)], cwd=folder, capture_output=True, text=True, check=False)


def test_only_commits_after_origin_main_are_checked(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "Something old")
    without = check(tmp_path)
    assert (without.returncode, "there is no origin/main" in without.stderr) == (0, True)
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "tests: Add guards")
    assert check(tmp_path).returncode == 0
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "Something else")
    refused = check(tmp_path)
    assert refused.returncode == 1
    assert "'Something else'" in refused.stderr
    assert "Something old" not in refused.stderr
