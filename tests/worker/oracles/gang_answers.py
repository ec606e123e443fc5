"""Answers of a program that runs cases in the processes of one gang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def answers_of(
    gang: Path, folder: Path, asked: list[dict[str, Any]], *, processes: int | None = None
) -> dict[str, dict[str, Any]]:
    """Run the cases and return their answers by name. Fails with the end of the program's output if it fails.

    `processes`: of a gang's program; by default as many as it starts itself.
    """
    environment = os.environ if processes is None else {**os.environ, "GANG_WORLD": str(processes)}
    cases, result = folder / "cases.json", folder / "result.json"
    cases.write_text(json.dumps(asked), encoding="utf-8")
    result.unlink(missing_ok=True)
    run = subprocess.run(
        [sys.executable, str(gang), str(cases), str(result)],
        check=False,
        capture_output=True,
        text=True,
        timeout=580,
        env=environment,
    )
    done = json.loads(result.read_text(encoding="utf-8")) if result.exists() else []
    assert run.returncode == 0, f"after {len(done)} cases: {run.stderr[-4000:]}"
    return {answer["name"]: answer for answer in done}
