"""`tune` with the real worker: a whole run, and one with a trial that crashes."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright_operator.local import loop

pytestmark = [pytest.mark.torch_processes, pytest.mark.timeout(600)]
SPEC: dict[str, Any] = {
    "profiling": {"warmupIterations": 1, "iterations": 2},
    "links": {"collectives": False, "overlap": False},
    "search": {"planner": "Amp", "limits": {"maxTensorDegree": 1}},
    "trials": {"topK": 2, "baseline": "Megatron", "warmupIterations": 1, "iterations": 3},
}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "state"


def test_whole_run_measures_every_plan_and_one_that_crashes_is_reported(
    plan_file: Callable[..., Path], state: Path
) -> None:
    path = plan_file(**SPEC)
    document = yaml.safe_load(path.read_text())
    document["metadata"]["annotations"] = {"trainwright.dev/rehearse-fault": "candidate-2=crash"}
    path.write_text(yaml.safe_dump(document))
    shown = io.StringIO()
    assert loop.tune(path, state=state, cpu_devices=2, stream=shown) == loop.ANSWERED, shown.getvalue()
    status = yaml.safe_load((state / "status.yaml").read_text())["status"]
    trials = {trial["name"]: trial for trial in status["trials"]}
    crashed = trials.pop("candidate-2")
    assert (crashed["state"], crashed["reason"]) == ("Failed", "Crashed")
    assert "rehearsed fault" in crashed["message"]
    assert all(trial["state"] == "Succeeded" and trial["measuredSeconds"] > 0 for trial in trials.values())
    assert status["winner"]["trial"] in trials
    assert status["cluster"]["devices"] == 2
