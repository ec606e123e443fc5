"""A kubectl first on PATH, which answers from files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ANSWER = """#!/bin/sh
cd '{folder}'
echo "$@" >> calls
number=$(wc -l < calls)
if [ "$number" -le "$(cat failures)" ]; then cat error >&2; exit 1; fi
[ -e "$number.json" ] || number=$(ls | sed -n 's/[.]json$//p' | sort -n | tail -1)
cat "$number.json"
"""

ALL_CALLS = 1_000
Cluster = Callable[..., Path]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Return a function that sets what kubectl answers call by call, the last one for ever, or the error that it fails with.

    `failures`: how many of the first calls fail, where not all. The folder that it returns holds the arguments of all calls in
    `calls`.
    """
    folder = tmp_path / "kubectl-of-test"
    folder.mkdir()
    program = folder / "kubectl"
    program.write_text(ANSWER.format(folder=folder), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def set_answers(*answers: dict[str, Any], error: str = "", failures: int = ALL_CALLS) -> Path:
        for number, answer in enumerate(answers, 1):
            (folder / f"{number}.json").write_text(json.dumps(answer), encoding="utf-8")
        (folder / "error").write_text(error, encoding="utf-8")
        (folder / "failures").write_text(str(failures if error else 0), encoding="utf-8")
        return folder

    return set_answers
