"""Plan that `tune` runs in a moment, with a worker that has no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_plan import PLAN

from trainwright_operator.local import gang_process, loop

HERE = Path(__file__).parent


@pytest.fixture
def plan_file(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the plan with some fields of its spec replaced."""

    def write(**spec: Any) -> Path:
        path = tmp_path / "plan.yaml"
        path.write_text(yaml.safe_dump(PLAN | {"spec": PLAN["spec"] | spec}))
        return path

    return write


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return `tune` on two CPU devices, with the worker of these tests and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parent / "simulation"), *sys.path]))
    monkeypatch.setattr(gang_process, "WORKER", "local_worker")
    monkeypatch.setattr(loop, "_PASS_SECONDS", 0.2)

    def run(path: Path, **options: Any) -> int:
        return loop.tune(path, **{"cpu_devices": 2, **options})

    return run
